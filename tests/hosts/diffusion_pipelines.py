"""Pipelines of diffusers around the tiny transformers, with the arguments of a call; text comes embedded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.hosts.diffusion_models import TEXT, drawn, padded

Made = tuple[Any, dict[str, Any]]


def without(kind: Any, scheduler: Any, transformer: Any, *more: str) -> Any:
    """A pipeline that has no VAE and no text encoders."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", *more))
    pipe = kind(**parts, scheduler=scheduler, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def shifted() -> Any:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def guided() -> dict[str, Any]:
    return {name: drawn(1, TEXT, 16) for name in ("prompt_embeds", "negative_prompt_embeds")}


def wan(transformer: Any) -> Made:
    pipe = without(diffusers.WanPipeline, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer)
    return pipe, {**guided(), "height": 64, "width": 96, "num_frames": 9}


def ltx(transformer: Any) -> Made:
    pipe = without(diffusers.LTXPipeline, shifted(), transformer)
    masks = {"prompt_attention_mask": padded(1), "negative_prompt_attention_mask": padded(1)}
    return pipe, {**guided(), **masks, "height": 128, "width": 192, "num_frames": 17}


def flux(transformer: Any) -> Made:
    pipe = without(diffusers.FluxPipeline, shifted(), transformer, "text_encoder_2", "tokenizer_2")
    texts = {"prompt_embeds": drawn(1, TEXT, 16), "pooled_prompt_embeds": drawn(1, 16)}
    return pipe, {**texts, "height": 128, "width": 192}


def flux2(transformer: Any) -> Made:
    pipe = without(diffusers.Flux2Pipeline, shifted(), transformer)
    return pipe, {"prompt_embeds": drawn(1, TEXT, 16), "height": 128, "width": 192}


def qwen_image(transformer: Any) -> Made:
    pipe = without(diffusers.QwenImagePipeline, shifted(), transformer)
    masks = {"prompt_embeds_mask": padded(1), "negative_prompt_embeds_mask": padded(1, real=3)}
    return pipe, {**guided(), **masks, "true_cfg_scale": 4.0, "height": 128, "width": 192}


def hunyuan_video(transformer: Any) -> Made:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = without(diffusers.HunyuanVideoPipeline, scheduler, transformer, "text_encoder_2", "tokenizer_2")
    texts = {"prompt_embeds": drawn(1, TEXT, 16), "pooled_prompt_embeds": drawn(1, 8)}
    return pipe, {**texts, "prompt_attention_mask": padded(1), "height": 64, "width": 96, "num_frames": 9}


def cogvideox(transformer: Any) -> Made:
    pipe = without(diffusers.CogVideoXPipeline, diffusers.CogVideoXDDIMScheduler(), transformer)
    return pipe, {**guided(), "height": 64, "width": 96, "num_frames": 9}


def mochi(transformer: Any) -> Made:
    pipe = without(diffusers.MochiPipeline, FlowMatchEulerDiscreteScheduler(invert_sigmas=True), transformer)
    masks = {"prompt_attention_mask": padded(1).bool(), "negative_prompt_attention_mask": padded(1, real=3).bool()}
    return pipe, {**guided(), **masks, "height": 64, "width": 96, "num_frames": 13}


def sd3(transformer: Any) -> Made:
    encoders = (f"{part}_{i}" for part in ("text_encoder", "tokenizer") for i in (2, 3))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = without(diffusers.StableDiffusion3Pipeline, scheduler, transformer, *encoders)
    pooled = {"pooled_prompt_embeds": drawn(1, 16), "negative_pooled_prompt_embeds": drawn(1, 16)}
    return pipe, {**guided(), **pooled, "height": 128, "width": 192}


PIPELINES: dict[str, Callable[[Any], Made]] = {
    "wan": wan,
    "ltx": ltx,
    "flux": flux,
    "flux2": flux2,
    "qwen_image": qwen_image,
    "hunyuan_video": hunyuan_video,
    "cogvideox": cogvideox,
    "mochi": mochi,
    "sd3": sd3,
}

"""Pipelines of diffusers around the tiny transformers, with the arguments of a call; text comes embedded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.hosts.diffusion_models import TEXT, Given, drawn, padded

Made = tuple[Any, Given]
VIDEO: Given = {"height": 64, "width": 96, "num_frames": 9}
PICTURE: Given = {"height": 128, "width": 192}


def of(kind: str, scheduler: Callable[[], Any], given: Callable[[], Given], *more: str) -> Callable[[Any], Made]:
    """A pipeline that has no VAE, no text encoders and none of the `more` parts."""

    def built(transformer: Any) -> Made:
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", *more))
        pipe = getattr(diffusers, kind)(**parts, scheduler=scheduler(), transformer=transformer)
        pipe.set_progress_bar_config(disable=True)
        return pipe, given()

    return built


def flow(**options: Any) -> Callable[[], Any]:
    return lambda: FlowMatchEulerDiscreteScheduler(**options)


def prompt(*, pooled: bool = False) -> Given:
    texts = {"prompt_embeds": drawn(1, TEXT, 16)}
    return texts | ({"pooled_prompt_embeds": drawn(1, 16)} if pooled else {})


def guided(*, pooled: bool = False) -> Given:
    both = prompt(pooled=pooled)
    return both | {f"negative_{name}": drawn(*x.shape) for name, x in both.items()}


def masks(of: str, *, real: int = 3) -> Given:
    return {of: padded(1), f"negative_{of}": padded(1, real=real)}


def bools(given: Given) -> Given:
    return {name: mask.bool() for name, mask in given.items()}


SHIFTED = flow(use_dynamic_shifting=True)
SECOND, THIRD = (("text_encoder_2", "tokenizer_2"), ("text_encoder_3", "tokenizer_3"))
PIPELINES: dict[str, Callable[[Any], Made]] = {
    "wan": of("WanPipeline", flow(shift=3.0), lambda: guided() | VIDEO),
    "ltx": of(
        "LTXPipeline",
        SHIFTED,
        lambda: guided() | masks("prompt_attention_mask", real=5) | PICTURE | {"num_frames": 17},
    ),
    "flux": of("FluxPipeline", SHIFTED, lambda: prompt(pooled=True) | PICTURE, *SECOND),
    "flux2": of("Flux2Pipeline", SHIFTED, lambda: prompt() | PICTURE),
    "qwen_image": of("QwenImagePipeline", SHIFTED, lambda: guided() | masks("prompt_embeds_mask") | PICTURE),
    "hunyuan_video": of(
        "HunyuanVideoPipeline",
        flow(shift=7.0),
        lambda: prompt(pooled=True) | {"prompt_attention_mask": padded(1)} | VIDEO,
        *SECOND,
    ),
    "cogvideox": of("CogVideoXPipeline", diffusers.CogVideoXDDIMScheduler, lambda: guided() | VIDEO),
    "mochi": of(
        "MochiPipeline",
        flow(invert_sigmas=True),
        lambda: guided() | bools(masks("prompt_attention_mask")) | VIDEO | {"num_frames": 13},
    ),
    "sd3": of("StableDiffusion3Pipeline", flow(shift=3.0), lambda: guided(pooled=True) | PICTURE, *SECOND, *THIRD),
}

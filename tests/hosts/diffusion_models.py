"""Tiny random transformers of diffusers, and the arguments of a forward call for each.

A size has one value wherever a model has a size of that name, and so has an argument of a call. A row of `CASES`
or `MORE` has the class, the shape of what is denoised, and what is special to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor

Grid = tuple[int, int, int]
Given = dict[str, Any]
TEXT = 7  # tokens of text, padding included
SMALL, LARGE = (3, 4, 6), (2, 7, 5)  # frames, rows and columns of tokens: 72 and 70
_SIZES: dict[Any, str] = {
    1: "num_refiner_layers n_refiner_layers num_text_blocks num_visual_blocks num_key_value_heads "
    "num_layerwise_text_blocks num_refiner_text_blocks approximator_layers",
    2: "num_attention_heads num_layers num_single_layers num_hidden_layers n_layers n_heads n_kv_heads "
    "audio_num_attention_heads num_text_layers text_num_attention_heads text_num_key_value_heads",
    4: "in_channels out_channels audio_in_channels audio_out_channels latent_channels latent_channel sound_dim "
    "in_visual_dim out_visual_dim in_audio_dim out_audio_dim cond_in_channels condition_dim adaln_lora_dim",
    8: "time_embed_dim time_dim timestep_embed_dim text_embed_2_dim image_embed_dim image_proj_dim "
    "audio_attention_head_dim approximator_num_channels time_embed_hidden_dim",
    16: "attention_head_dim head_dim text_dim text_embed_dim text_in_dim text_hidden_dim text_intermediate_size "
    "cap_feat_dim in_text_dim in_text_dim2 joint_attention_dim context_in_dim caption_channels "
    "pooled_projection_dim audio_cross_attention_dim freq_dim timestep_channels timestep_guidance_channels "
    "approximator_hidden_dim",
    32: "ffn_dim ff_dim ffn_hidden_size model_dim dim hidden_size intermediate_size cross_attention_dim "
    "caption_projection_dim",
    (4, 4, 8): "axes_dims_rope rope_axes_dim axes_dims",
}
_SIZE = {name: value for value, names in _SIZES.items() for name in names.split()}
_SHAPES: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "video": lambda B, T, H, W: (B, 4, T, 2 * H, 2 * W),
    "frames": lambda B, T, H, W: (B, T, 4, 2 * H, 2 * W),
    "channels last": lambda B, T, H, W: (B, T, 2 * H, 2 * W, 4),
    "cells": lambda B, T, H, W: (B, 4, T, H, W),
    "picture": lambda B, T, H, W: (B, 4, 2 * H, 2 * W),
    "cells of a picture": lambda B, T, H, W: (B, 4, H, W),
    "tokens": lambda B, T, H, W: (B, T * H * W, 4),
}


class Case(NamedTuple):
    """A transformer, and the arguments of a call for a grid of tokens and a batch."""

    model: Callable[[], Any]
    given: Callable[[Grid, int], Given]
    layers: int
    image: bool = False  # whether the grid must have one frame


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def at(batch: int, timestep: float) -> Tensor:
    return torch.full((batch,), timestep)


def padded(batch: int, real: int = 5) -> Tensor:
    """A mask of text `[B, TEXT]`: the first entry is whole, the others have padding; alone, it has padding too."""
    mask = torch.ones(batch, TEXT, dtype=torch.long)
    mask[-1, real:] = 0
    return mask


def positions(grid: Grid, axes: int = 3) -> Tensor:
    """The positions of the cells of an image `[N, axes]`."""
    _, H, W = grid
    place = torch.cartesian_prod(torch.arange(H), torch.arange(W)).float()
    return torch.cat((torch.zeros(len(place), 1), place, torch.zeros(len(place), axes - 3)), dim=1)


def of(
    kind: str,
    shape: str,
    layers: int = 2,
    more: Callable[[Grid, int], Given] | None = None,
    *,
    without: str = "",
    image: bool = False,
    **sizes: Any,
) -> Case:
    """A row: `more` arguments of a call, those that it goes `without`, and other sizes."""

    def built() -> Any:
        names = inspect.signature(getattr(diffusers, kind).__init__).parameters
        own = {name: value for name, value in _SIZE.items() if name in names}
        if "num_single_layers" in names:
            own["num_layers"] = 1
        return getattr(diffusers, kind)(**own | sizes)

    def given(grid: Grid, batch: int) -> Given:
        T, H, W = grid
        takes = inspect.signature(getattr(diffusers, kind).forward).parameters.keys() - set(without.split())
        axes = len(sizes.get("axes_dims_rope", (4, 4, 8)))
        found = {
            "hidden_states": drawn(*_SHAPES[shape](batch, T, H, W)),
            "timestep": at(batch, 900.0),
            "encoder_hidden_states": drawn(batch, TEXT, 16),
            "encoder_attention_mask": padded(batch),
            "encoder_hidden_states_2": drawn(batch, TEXT, 8),
            "encoder_attention_mask_2": padded(batch, real=3),
            "pooled_projections": drawn(batch, 16),
            "image_embeds": drawn(batch, 3, 8),
            "guidance": at(batch, 6.0),
            "img_ids": positions(grid, axes),
            "txt_ids": torch.zeros(TEXT, axes),
            "num_frames": T,
            "height": H,
            "width": W,
        }
        return {name: x for name, x in found.items() if name in takes} | (more(grid, batch) if more else {})

    return Case(built, given, layers, image)


def rotary(grid: Grid, batch: int) -> Given:
    return {"image_rotary_emb": (drawn(prod(grid), 16), drawn(prod(grid), 16))}


def per_frame(grid: Grid, batch: int) -> Given:
    return {name: at(batch, 900.0)[:, None].expand(-1, grid[0]) for name in ("timestep", "r_timestep")}


def for_each_entry(grid: Grid, batch: int) -> Given:
    return {"img_ids": positions(grid, 4).expand(batch, -1, -1), "txt_ids": torch.zeros(batch, TEXT, 4)}


def qwen(grid: Grid, batch: int) -> Given:
    mask = padded(batch).bool()
    return {"encoder_hidden_states_mask": mask, "img_shapes": [[(1, *grid[1:])]] * batch}


def an_image_or_none(grid: Grid, batch: int) -> Given:
    return {"image_embeds": drawn(batch, 4, 8) * (batch > 1)}  # zeros stand for no image


def bool_mask(grid: Grid, batch: int) -> Given:
    return {"encoder_attention_mask": padded(batch).bool()}


COGVIDEO: Given = {"patch_size": 2, "max_text_seq_length": TEXT, "use_rotary_positional_embeddings": True}
MOCHI: Given = {"num_attention_heads": 8, "attention_head_dim": 8, "max_sequence_length": TEXT}
SD3: Given = {"sample_size": 16, "patch_size": 2, "pos_embed_max_size": 24, "dual_attention_layers": (0,)}
CASES = {
    "wan": of("WanTransformer3DModel", "video", rope_max_seq_len=32),
    "ltx": of("LTXVideoTransformer3DModel", "tokens"),
    "flux": of("FluxTransformer2DModel", "tokens", 3, guidance_embeds=True, image=True),
    "flux2": of("Flux2Transformer2DModel", "tokens", 3, for_each_entry, axes_dims_rope=(4, 4, 4, 4), image=True),
    "qwen_image": of(
        "QwenImageTransformer2DModel", "tokens", 2, qwen, without="guidance", out_channels=1, image=True
    ),
    "hunyuan_video": of("HunyuanVideoTransformer3DModel", "video", 3, guidance_embeds=True),
    "hunyuan_video_15": of(
        "HunyuanVideo15Transformer3DModel", "cells", 2, an_image_or_none, patch_size=1, patch_size_t=1
    ),
    "cogvideox": of("CogVideoXTransformer3DModel", "frames", 2, rotary, **COGVIDEO),
    "mochi": of("MochiTransformer3DModel", "video", 2, bool_mask, **MOCHI),
    "sd3": of("SD3Transformer2DModel", "picture", **SD3, qk_norm="rms_norm", image=True),
}


def given(case: Case, grid: Grid, batch: int = 1) -> Given:
    """The arguments of a call; an image has all frames of the grid side by side."""
    T, H, W = grid
    torch.manual_seed(0)
    return case.given((1, H, T * W) if case.image else grid, batch)


# The other families


def chroma(grid: Grid, batch: int) -> Given:
    return {
        "attention_mask": torch.cat((padded(batch).bool(), torch.ones(batch, prod(grid), dtype=torch.bool)), dim=1)
    }


def control(grid: Grid, batch: int) -> Given:
    T, H, W = grid
    return {"control_hidden_states": drawn(batch, 8, T, 2 * H, 2 * W)}


def animate(grid: Grid, batch: int) -> Given:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, 12, T, 2 * H, 2 * W),
        "pose_hidden_states": drawn(batch, 4, T - 1, 2 * H, 2 * W),
        "face_pixel_values": drawn(batch, 3, 4 * (T - 1), 16, 16),
    }


ANIMATE: Given = {
    "in_channels": 12, "image_dim": 4, "motion_encoder_channel_sizes": {str(size): 4 for size in (4, 8, 16)},
    "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8,
    "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
}  # fmt: skip


def ltx_2(grid: Grid, batch: int) -> Given:
    """The frame behind the video is given."""
    T, H, W = grid
    cells = torch.meshgrid(*(torch.arange(n) for n in (T + 1, H, W)), indexing="ij")
    places = torch.stack(cells).flatten(1).float()
    return {
        "hidden_states": drawn(batch, (T + 1) * H * W, 4),
        "audio_hidden_states": drawn(batch, 5, 4),
        "audio_encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0)[:, None],
        "audio_encoder_attention_mask": padded(batch),
        "audio_num_frames": 5,
        "video_coords": torch.stack((places, places + 1), -1).expand(batch, -1, -1, -1),
    }


def kandinsky_5(grid: Grid, batch: int) -> Given:
    places = [torch.arange(n) for n in grid]
    return {"visual_rope_pos": places, "text_rope_pos": torch.arange(TEXT), "return_dict": True}


def earlier(grid: Grid, batch: int, names: tuple[str, str, str], *entries: int) -> tuple[Given, int]:
    """16 frames at a quarter of the size, 2 at half, 2 whole ones; and the next index."""
    found, first = {}, 0
    for name, frames in zip(names, (16, 2, 2), strict=True):
        found[f"latents_{name}"] = drawn(batch, 4, frames, 2 * grid[1], 2 * grid[2])
        found[f"indices_latents_{name}"] = torch.arange(first, first + frames).expand(*entries, frames)
        first += frames
    return found, first


def framepack(grid: Grid, batch: int) -> Given:
    found, first = earlier(grid, batch, ("history_4x", "history_2x", "clean"))
    return {**found, "indices_latents": torch.arange(first, first + grid[0])}


def helios(grid: Grid, batch: int) -> Given:
    found, first = earlier(grid, batch, ("history_long", "history_mid", "history_short"), batch)
    return {**found, "indices_hidden_states": torch.arange(first, first + grid[0]).expand(batch, -1)}


def minimax_h3(grid: Grid, batch: int) -> Given:
    """`[text | a frame that is given | audio | video]`, as the pipelines of diffusers pack them."""
    T, H, W = grid
    frame, audio = H * W, 6
    lengths = [TEXT, frame, audio, T * frame]
    text, condition, sound, video = torch.arange(sum(lengths)).split(lengths)
    places = torch.cartesian_prod(torch.arange(H), torch.arange(W)).double()
    ids = torch.zeros(sum(lengths), 3, dtype=torch.float64)
    ids[text, 0] = text.double()
    ids[condition, 0], ids[condition, 1:] = float(TEXT), places
    ids[sound, 0] = TEXT + torch.arange(audio).double()
    ids[video, 0] = (TEXT + torch.arange(T).double() * 5 / 3).repeat_interleave(frame)
    ids[video, 1:] = places.repeat(T, 1)
    return {
        "hidden_states": drawn(batch, (T + 1) * frame, 16),
        "audio_hidden_states": drawn(batch, audio, 4),
        "timestep": torch.tensor([0.1, 0.2, 0.99]),  # of video, audio, and the frame that is given
        "timestep_indices": torch.tensor([0, 2, 1, 0]).repeat_interleave(torch.tensor(lengths)),
        "token_tags": torch.tensor([1, 0, 2, 0]).repeat_interleave(torch.tensor(lengths)),
        "position_ids": ids,
        "video_indices": torch.cat((condition, video)),
        "audio_indices": sound,
        "text_indices": text,
    }


def cosmos_3(grid: Grid, batch: int) -> Given:
    """Text, then the video, then its sound. Two halves of guidance are two calls."""
    T, H, W = grid
    cells, sound = prod(grid), 4
    tokens = TEXT + cells + sound
    found: Given = {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.arange(tokens).expand(3, -1) + batch,
        "und_len": TEXT,
        "sequence_length": tokens,
        "vision_tokens": [drawn(1, 4, T, 2 * H, 2 * W)],
        "sound_tokens": [drawn(4, sound)],
    }
    for name, first, n, shape in (("vision", TEXT, cells, grid), ("sound", TEXT + cells, sound, (sound, 1, 1))):
        for use in ("sequence", "mse_loss"):
            found[f"{name}_{use}_indexes"] = torch.arange(first, first + n)
        found |= {f"{name}_token_shapes": [shape], f"{name}_timesteps": at(n, 900.0)}
        found[f"{name}_noisy_frame_indexes"] = [torch.arange(shape[0])]
    return found


def flux_3(grid: Grid, batch: int) -> Given:
    """One picture as large as that which is made, and one reference."""
    reference = positions((1, 3, 5), 4) + torch.tensor([1.0, 0.0, 0.0, 0.0])
    return {"image_cond_hidden_states": drawn(batch, 15, 4), "image_cond_ids": reference}


def qwen_image_21(grid: Grid, batch: int) -> Given:
    """Text, a reference of 8 tokens, text; then the picture. A slot of an image is four tokens."""
    _, H, W = grid
    H += H % 2
    mask = torch.ones(batch, 8, dtype=torch.bool)
    mask[-1, 6:] = False
    return {
        "hidden_states": drawn(batch, 8 + H * W, 4),
        "encoder_hidden_states": drawn(batch, 8, 16),
        "encoder_hidden_states_mask": mask,
        "img_shapes": [[(1, 2, 4), (1, H, W)]] * batch,
        "img_mask": torch.tensor([False] * 3 + [True] * 2 + [False] * 3 + [True] * (H * W // 4)).expand(batch, -1),
    }


def z_image(grid: Grid, batch: int) -> Given:
    """Texts of 7 and of 40 tokens are 32 and 64 in the model."""
    pictures = [drawn(4, 1, 2 * grid[1], 2 * grid[2]) for _ in range(batch)]
    return {"x": pictures, "t": at(batch, 0.1), "cap_feats": [drawn(length, 16) for length in (TEXT, 40)[:batch]]}


def cogview_4(grid: Grid, batch: int) -> Given:
    size = torch.tensor([[64.0, 64.0]]).expand(batch, -1)
    return {"original_size": size, "target_size": size, "crop_coords": torch.zeros(batch, 2)}


def krea_2(grid: Grid, batch: int) -> Given:
    places = torch.cat((torch.zeros(TEXT, 3), positions(grid)))
    return {"encoder_hidden_states": drawn(batch, TEXT, 2, 16), "position_ids": places} | bool_mask(grid, batch)


def ernie_image(grid: Grid, batch: int) -> Given:
    return {"text_bth": drawn(batch, TEXT, 16), "text_lens": padded(batch).sum(1)}


def with_sound(grid: Grid, batch: int) -> Given:
    return {"audio_hidden_states": drawn(batch, 5, 4)}


COSMOS: Given = {"mlp_ratio": 2, "max_size": (4, 32, 32), "concat_padding_mask": False}
MORE = {
    "any_flow": of("AnyFlowTransformer3DModel", "frames", 2, per_frame, rope_max_seq_len=32),
    "bria": of("BriaTransformer2DModel", "tokens", 3, without="pooled_projections guidance", image=True),
    "chroma": of("ChromaTransformer2DModel", "tokens", 3, chroma, image=True),
    "chrono_edit": of("ChronoEditTransformer3DModel", "video", rope_max_seq_len=32),
    "cogview_4": of(
        "CogView4Transformer2DModel", "picture", 2, cogview_4,
        pos_embed_max_size=8, rope_axes_dim=(32, 32), image=True,
    ),
    "consis_id": of("ConsisIDTransformer3DModel", "frames", 2, rotary, **COGVIDEO),
    "cosmos": of("CosmosTransformer3DModel", "video", 2, lambda grid, batch: {"fps": 16}, **COSMOS),
    "cosmos_3": of(
        "Cosmos3OmniTransformer", "tokens", 2, cosmos_3,
        patch_latent_dim=16, vocab_size=16, sound_gen=True, dtype="float32", rope_axes_dim=[4, 2, 2],
    ),
    "ernie_image": of("ErnieImageTransformer2DModel", "cells of a picture", 2, ernie_image, image=True),
    "flux_3": of("Flux3Transformer2DModel", "tokens", 2, flux_3, axes_dims_rope=(4, 4, 4, 4), image=True),
    "framepack": of(
        "HunyuanVideoFramepackTransformer3DModel", "video", 3, framepack,
        has_image_proj=True, has_clean_x_embedder=True,
    ),
    "helios": of("HeliosTransformer3DModel", "video", 2, helios, rope_dim=(4, 6, 6)),
    "hunyuan_image": of(
        "HunyuanImageTransformer2DModel", "cells of a picture", 3,
        without="guidance", rope_axes_dim=(8, 8), image=True,
    ),
    # Between its blocks it rounds to bfloat16.
    "kandinsky_5": of("Kandinsky5Transformer3DModel", "channels last", 1, kandinsky_5),
    "kandinsky_6": of(
        "Kandinsky6Transformer3DModel", "channels last", 2, with_sound,
        without="encoder_attention_mask", num_visual_blocks=2, visual_cond=False,
    ),
    "krea_2": of("Krea2Transformer2DModel", "tokens", 2, krea_2, image=True),
    "longcat_image": of("LongCatImageTransformer2DModel", "tokens", 3, without="guidance", image=True),
    "ltx_2": of("LTX2VideoTransformer3DModel", "tokens", 2, ltx_2),
    "minimax_h3": of("MiniMaxH3Transformer3DModel", "tokens", 2, minimax_h3, rope_freq_dim=2, freq_dim=8),
    "motif_video": of("MotifVideoTransformer3DModel", "video", 3),
    "ovis_image": of("OvisImageTransformer2DModel", "tokens", 3, image=True),
    "qwen_image_21": of("QwenImage21Transformer2DModel", "tokens", 2, qwen_image_21, image=True),
    "skyreels": of("SkyReelsV2Transformer3DModel", "video", rope_max_seq_len=32),
    "wan_animate": of("WanAnimateTransformer3DModel", "video", 2, animate, rope_max_seq_len=32, **ANIMATE),
    "wan_vace": of(
        "WanVACETransformer3DModel", "video", 3, control, rope_max_seq_len=32, vace_layers=[0], vace_in_channels=8
    ),
    "z_image": of("ZImageTransformer2DModel", "tokens", 2, z_image, axes_lens=[256, 128, 128], image=True),
}  # fmt: skip

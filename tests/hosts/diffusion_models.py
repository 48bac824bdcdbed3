"""Tiny random transformers of diffusers, and the arguments of a forward call for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor

TEXT = 7  # tokens of text, padding included
SMALL, LARGE = (3, 4, 6), (2, 7, 5)  # frames, rows and columns of tokens: 72 and 70


class Case(NamedTuple):
    """A transformer, and the arguments of a call for a grid of tokens and a batch."""

    model: Callable[[], Any]
    given: Callable[[tuple[int, int, int], int], dict[str, Any]]
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


def positions(grid: tuple[int, int, int], axes: int) -> Tensor:
    """The positions of the cells of an image `[N, axes]`."""
    _, H, W = grid
    place = torch.cartesian_prod(torch.arange(H), torch.arange(W)).float()
    return torch.cat((torch.zeros(len(place), 1), place, torch.zeros(len(place), axes - 3)), dim=1)


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


def wan_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, T, 2 * H, 2 * W),
        "timestep": at(batch, 900.0),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
    }


def ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    )  # fmt: skip


def ltx_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T * H * W, 8),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "encoder_attention_mask": padded(batch),
        "num_frames": T,
        "height": H,
        "width": W,
    }


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    ids = positions(grid, 3)
    return {
        "hidden_states": drawn(batch, len(ids), 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "pooled_projections": drawn(batch, 16),
        "timestep": at(batch, 0.9),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": at(batch, 3.5),
    }


def flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip


def flux2_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    ids = positions(grid, 4)
    return {
        "hidden_states": drawn(batch, len(ids), 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 0.9),
        "img_ids": ids.expand(batch, -1, -1),
        "txt_ids": torch.zeros(batch, TEXT, 4),
        "guidance": at(batch, 3.5),
    }


def qwen_image() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=1, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def qwen_image_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    _, H, W = grid
    return {
        "hidden_states": drawn(batch, H * W, 4),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "encoder_hidden_states_mask": padded(batch).bool(),
        "timestep": at(batch, 0.9),
        "img_shapes": [[(1, H, W)]] * batch,
    }


def hunyuan_video() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8),
    )  # fmt: skip


def hunyuan_video_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, T, 2 * H, 2 * W),
        "timestep": at(batch, 900.0),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "encoder_attention_mask": padded(batch),
        "pooled_projections": drawn(batch, 8),
        "guidance": at(batch, 6000.0),
    }


def hunyuan_video_15() -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=8,
        image_embed_dim=8, rope_axes_dim=(4, 4, 8),
    )  # fmt: skip


def hunyuan_video_15_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    return {
        "hidden_states": drawn(batch, 4, *grid),
        "timestep": at(batch, 900.0),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "encoder_attention_mask": padded(batch),
        "encoder_hidden_states_2": drawn(batch, TEXT, 8),
        "encoder_attention_mask_2": padded(batch, real=3),
        "image_embeds": drawn(batch, 4, 8) * (batch > 1),  # zeros stand for no image
    }


def cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, patch_size=2, max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip


def cogvideox_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, T, 4, 2 * H, 2 * W),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 900.0),
        "image_rotary_emb": (drawn(T * H * W, 16), drawn(T * H * W, 16)),
    }


def mochi() -> Any:
    return diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=8, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, out_channels=4, text_embed_dim=16, time_embed_dim=8, max_sequence_length=TEXT,
    )  # fmt: skip


def mochi_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    T, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, T, 2 * H, 2 * W),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "timestep": at(batch, 100.0),
        "encoder_attention_mask": padded(batch).bool(),
    }


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=24, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_given(grid: tuple[int, int, int], batch: int) -> dict[str, Any]:
    _, H, W = grid
    return {
        "hidden_states": drawn(batch, 4, 2 * H, 2 * W),
        "encoder_hidden_states": drawn(batch, TEXT, 16),
        "pooled_projections": drawn(batch, 16),
        "timestep": at(batch, 900.0),
    }


CASES = {
    "wan": Case(wan, wan_given, 2),
    "ltx": Case(ltx, ltx_given, 2),
    "flux": Case(flux, flux_given, 3, image=True),
    "flux2": Case(flux2, flux2_given, 3, image=True),
    "qwen_image": Case(qwen_image, qwen_image_given, 2, image=True),
    "hunyuan_video": Case(hunyuan_video, hunyuan_video_given, 3),
    "hunyuan_video_15": Case(hunyuan_video_15, hunyuan_video_15_given, 2),
    "cogvideox": Case(cogvideox, cogvideox_given, 2),
    "mochi": Case(mochi, mochi_given, 2),
    "sd3": Case(sd3, sd3_given, 2, image=True),
}


def given(case: Case, grid: tuple[int, int, int], batch: int = 1) -> dict[str, Any]:
    """The arguments of a call; an image has all frames of the grid side by side."""
    T, H, W = grid
    torch.manual_seed(0)
    return case.given((1, H, T * W) if case.image else grid, batch)

"""Transformers that attend over a video alone: text has a cross attention, and audio a sequence of its own."""

from __future__ import annotations

from typing import Any

from blocksparse.integrations.diffusers.families.family import (
    Arguments,
    Family,
    checked,
    patches,
    with_conditions_behind,
)
from blocksparse.integrations.token_layout import TokenLayout


def _channels_first(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((patches(given["hidden_states"].shape[2:], config.patch_size),))


def _frames_first(config: Any, given: Arguments) -> TokenLayout:
    T, _, H, W = given["hidden_states"].shape[1:]
    return TokenLayout((patches((T, H, W), config.patch_size),))


def _channels_last(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((patches(given["hidden_states"].shape[1:4], config.patch_size),))


def _ltx(_: Any, given: Arguments) -> TokenLayout | None:
    grid = given["num_frames"], given["height"], given["width"]
    return checked((grid,), given["hidden_states"].shape[1]) if None not in grid else None


def _ltx_2(_: Any, given: Arguments) -> TokenLayout | None:
    """Tokens of given frames and of references stand behind those of the video."""
    grid = given["num_frames"], given["height"], given["width"]
    return with_conditions_behind(grid, given["hidden_states"].shape[1]) if None not in grid else None


WAN = Family(_channels_first, ("attn1",))  # and what was made from it
WAN_VACE = Family(_channels_first, ("attn1",), parts=("vace_blocks", "blocks"))  # controls run first
COSMOS = Family(_channels_first, ("attn1",))
ANY_FLOW = Family(_frames_first, ("attn1",))
LTX = Family(_ltx, ("attn1",))
LTX_2 = Family(_ltx_2, ("attn1",))
KANDINSKY_5 = Family(_channels_last, ("self_attention",), parts=("visual_transformer_blocks",))
KANDINSKY_6 = Family(_channels_last, ("video_dec_block.self_attention",), parts=("visual_transformer_blocks",))

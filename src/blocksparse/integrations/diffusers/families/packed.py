"""Transformers that pack text, audio, frames that are given and the video into one sequence, in their own order.

All but the picture or the video that is made counts as text: it is always kept, as queries and as keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from blocksparse.integrations.diffusers.families.family import Arguments, Family, counts, padding_ends, patches
from blocksparse.integrations.token_layout import Sizes, TokenLayout


def _minimax_h3(_: Any, given: Arguments) -> TokenLayout | None:
    """`[text | frames that are given, references | audio | video]`: the video is the last run of video rows."""
    rows, tokens = given["video_indices"].cpu(), given["token_tags"].shape[0]
    step = given["timestep_indices"].cpu()[rows]
    others = ((rows[1:] != rows[:-1] + 1) | (step[1:] != step[:-1])).nonzero()
    video = rows[int(others[-1]) + 1 :] if len(others) else rows
    grid = _grid_of(given["position_ids"].cpu()[video])
    return grid and TokenLayout((grid,), text=tokens - len(video), before=int(video[0]), together=True)


def _of_the_video(given: Arguments) -> Any:
    """References and audio have timesteps of their own."""
    last = given["timestep_indices"][given["video_indices"][-1]]
    return given["timestep"][last]


def _grid_of(places: Tensor) -> Sizes | None:
    """The grid whose cells have these times, rows and columns `[N, 3]`; None if they are not one whole grid."""
    frames = len(places[:, 0].unique_consecutive())
    cells, uneven = divmod(len(places), frames)
    rows, columns = (places[:cells, axis].unique() for axis in (1, 2))
    if uneven or not torch.equal(places[:, 1:], torch.cartesian_prod(rows, columns).repeat(frames, 1)):
        return None
    return frames, len(rows), len(columns)


def _cosmos_3(_: Any, given: Arguments) -> TokenLayout | None:
    """Text attends to itself. Videos, sound and actions attend to text, which stands first, and to one another.

    One video whose rows stand together is a grid. Sound and actions are kept.
    """
    rows, grids = given["vision_sequence_indexes"].cpu(), given["vision_token_shapes"]
    first, tokens = int(rows[0]), given["sequence_length"]
    if len(grids) > 1 or not torch.equal(rows, torch.arange(first, first + len(rows))):
        return None
    T, H, W = map(int, grids[0])
    return TokenLayout(((T, H, W),), text=tokens - len(rows), before=first) if len(rows) == T * H * W else None


def _qwen_image_21(_: Any, given: Arguments) -> TokenLayout | None:
    """Text and references attend to what stands before them, the picture behind them to everything."""
    first, *others = given["img_shapes"]
    if any(list(other) != list(first) for other in others):
        return None
    grid, is_image, mask = tuple(map(int, first[-1])), given["img_mask"][0], given["encoder_hidden_states_mask"]
    T, H, W = grid
    lengths = torch.where(is_image, 4, 1)  # a slot of an image stands for four tokens
    text = int(lengths.sum()) - prod(grid)
    real = None
    if mask is not None:
        slots = mask.bool() | is_image[: mask.shape[1]]
        if not padding_ends(slots):
            return None
        real = counts(slots * lengths[: mask.shape[1]])
    return TokenLayout(((T, H, W),), text=text, before=text, real=real, together=True)


def _hunyuan_video_framepack(config: Any, given: Arguments) -> TokenLayout:
    """Earlier frames, coarser the longer they are past, stand before the video, a picture and text behind it."""
    p, p_t = config.patch_size, config.patch_size_t
    grid = patches(given["hidden_states"].shape[2:], (p_t, p, p))
    past = _earlier(given, latents_clean=(1, 2, 2), latents_history_2x=(2, 4, 4), latents_history_4x=(4, 8, 8))
    kept = past + given["image_embeds"].shape[1]
    text, mask = given["encoder_hidden_states"].shape[1], given["encoder_attention_mask"]
    return TokenLayout(
        (grid,), text=kept + text, before=past, real=tuple(kept + n for n in counts(mask)), together=True
    )


def _helios(config: Any, given: Arguments) -> TokenLayout:
    """Earlier frames, coarser the longer they are past, stand before the video."""
    patch = config.patch_size
    twice, four_times = (tuple(n * p for p in patch) for n in (2, 4))
    past = _earlier(given, latents_history_short=patch, latents_history_mid=twice, latents_history_long=four_times)
    grid = patches(given["hidden_states"].shape[2:], patch)
    return TokenLayout((grid,), text=past, before=past, together=True)


def _earlier(given: Arguments, **patch: Any) -> int:
    """The tokens of earlier frames, by the names of their latents and the patches of each, which are filled up."""
    frames = {
        name: given[name] for name in patch if given[name] is not None and given[f"indices_{name}"] is not None
    }
    return sum(
        prod(-(-size // step) for size, step in zip(x.shape[2:], patch[name], strict=True))
        for name, x in frames.items()
    )


MINIMAX_H3 = Family(_minimax_h3, ("attn",), rising=True, timestep=_of_the_video)
COSMOS_3 = Family(_cosmos_3, ("self_attn",), timestep=lambda given: given["vision_timesteps"])
QWEN_IMAGE_21 = Family(_qwen_image_21, ("attn",), redirected=True)
HUNYUAN_VIDEO_FRAMEPACK = Family(_hunyuan_video_framepack, ("attn",))
HELIOS = Family(_helios, ("attn1",))

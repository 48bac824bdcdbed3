"""Transformers with text and a picture or a video in one sequence: text at one end, or all in their own order.

All but the picture or the video that is made counts as text: it is always kept, as queries and as keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from blocksparse.hosts.diffusers.family import (
    Arguments,
    Family,
    checked,
    counts,
    grids_of,
    padding_ends,
    patches,
)
from blocksparse.hosts.token_layout import Sizes, TokenLayout


def _flux(_: Any, given: Arguments) -> TokenLayout | None:
    """Pictures are known by the position of each token, `[N, 3]` or `[N, 4]`."""
    ids = given["img_ids"]
    grids = grids_of(ids[0] if ids.ndim == 3 else ids)
    text = given["encoder_hidden_states"].shape[1]
    return None if grids is None else checked(grids, given["hidden_states"].shape[1], text=text, before=text)


def _flux_2(config: Any, given: Arguments) -> TokenLayout | None:
    # With a cache, tokens of reference pictures are keys only, or attend among themselves.
    return None if given["kv_cache_mode"] is not None else _flux(config, given)


def _flux_3(config: Any, given: Arguments) -> TokenLayout | None:
    """References stand behind the picture, with their own positions."""
    if given["image_cond_ids"] is None:
        return _flux(config, given)
    both = torch.cat([ids[0] if ids.ndim == 3 else ids for ids in (given["img_ids"], given["image_cond_ids"])])
    states = torch.cat((given["hidden_states"][:, :, :1], given["image_cond_hidden_states"][:, :, :1]), dim=1)
    return _flux(config, {**given, "img_ids": both, "hidden_states": states})


def _chroma(config: Any, given: Arguments) -> TokenLayout | None:
    """Padding of the text is masked, of queries as well as of keys."""
    layout, mask = _flux(config, given), given["attention_mask"]
    if layout is None or mask is None:
        return layout
    of_text, of_pictures = mask[:, : layout.text].bool(), mask[:, layout.text :].bool()
    if not (of_pictures.all() and padding_ends(of_text)):
        return None
    return evolve(layout, real=counts(of_text))


def _qwen_image(_: Any, given: Arguments) -> TokenLayout | None:
    shapes, text, mask = given["img_shapes"], given["encoder_hidden_states"], given["encoder_hidden_states_mask"]
    if not shapes:
        return None
    first, *others = ([shape] if isinstance(shape[0], int) else shape for shape in shapes)
    if any(list(other) != list(first) for other in others):
        return None
    # Padding inside the text is left to the model's own mask.
    if mask is not None and not padding_ends(mask.bool()):
        return None
    real, tokens = None if mask is None else counts(mask.bool()), text.shape[1]
    return checked(tuple(first), given["hidden_states"].shape[1], text=tokens, before=tokens, real=real)


def _krea_2(_: Any, given: Arguments) -> TokenLayout | None:
    text, mask = given["encoder_hidden_states"].shape[1], given["encoder_attention_mask"]
    grids = grids_of(given["position_ids"][text:])
    if grids is None or (mask is not None and not padding_ends(mask.bool())):
        return None
    real = None if mask is None else counts(mask.bool())
    return checked(grids, given["hidden_states"].shape[1], text=text, before=text, real=real)


def _cogview_4(config: Any, given: Arguments) -> TokenLayout | None:
    H, W = given["hidden_states"].shape[-2:]
    text, p = given["encoder_hidden_states"].shape[1], config.patch_size
    return TokenLayout(((1, H // p, W // p),), text=text, before=text)


def _z_image(_: Any, given: Arguments) -> TokenLayout | None:
    """Pictures are filled up to a multiple of 32 tokens, and the text behind them too. All is attended to."""
    pictures, texts, p = given["x"], given["cap_feats"], given["patch_size"]
    if isinstance(pictures[0], list) or len({picture.shape for picture in pictures}) > 1:
        return None  # several pictures in each entry, or entries of several sizes
    grid = patches(pictures[0].shape[1:], (given["f_patch_size"], p, p))
    cells = grid[0] * grid[1] * grid[2]
    real = tuple(-cells % 32 + len(text) + -len(text) % 32 for text in texts)
    return TokenLayout((grid,), text=max(real), real=real)


def _ernie_image(config: Any, given: Arguments) -> TokenLayout:
    H, W = (size // config.patch_size for size in given["hidden_states"].shape[-2:])
    return TokenLayout(((1, H, W),), text=given["text_bth"].shape[1], real=tuple(given["text_lens"].tolist()))


def _hunyuan_image(config: Any, given: Arguments) -> TokenLayout:
    """Glyphs stand before the text; the padding of both stands at the end."""
    *frames, H, W = given["hidden_states"].shape[2:]
    grid = patches((*(frames or (1,)), H, W), (1, *config.patch_size)[-3:])
    masks = [given["encoder_attention_mask"], given["encoder_attention_mask_2"]]
    masks = [mask for mask in masks if mask is not None]
    real = tuple(sum(each) for each in zip(*(counts(mask.bool()) for mask in masks), strict=True))
    return TokenLayout((grid,), text=sum(mask.shape[1] for mask in masks), real=real)


def _hunyuan_video(config: Any, given: Arguments) -> TokenLayout:
    grid = patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    mask = given["encoder_attention_mask"]
    return TokenLayout((grid,), text=given["encoder_hidden_states"].shape[1], real=counts(mask))


def _hunyuan_video_15(config: Any, given: Arguments) -> TokenLayout:
    """Text, glyphs and picture embeddings stand behind the video, the padding of all of them at the end."""
    grid = patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    masks = given["encoder_attention_mask"].bool(), given["encoder_attention_mask_2"].bool()
    image = given["image_embeds"]
    seen = 0 if bool((image == 0).all()) else image.shape[1]
    return TokenLayout(
        (grid,),
        text=masks[0].shape[1] + masks[1].shape[1] + image.shape[1],
        real=tuple(one + two + seen for one, two in zip(*map(counts, masks), strict=True)),
    )


def _motif_video(config: Any, given: Arguments) -> TokenLayout | None:
    """The picture embedding stands before the text, whose padding is masked."""
    grid = patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    image, mask = given["image_embeds"], given["encoder_attention_mask"]
    seen = 0 if image is None else image.shape[1]
    if mask is not None and not padding_ends(mask.bool()):
        return None
    real = None if mask is None else tuple(seen + n for n in counts(mask.bool()))
    return TokenLayout((grid,), text=seen + given["encoder_hidden_states"].shape[1], real=real)


def _cogvideox(config: Any, given: Arguments) -> TokenLayout:
    T, _, H, W = given["hidden_states"].shape[1:]
    p, p_t = config.patch_size, config.get("patch_size_t")
    frames = T if p_t is None else (T + p_t - 1) // p_t
    text = given["encoder_hidden_states"].shape[1]
    return TokenLayout(((frames, H // p, W // p),), text=text, before=text)


def _mochi(config: Any, given: Arguments) -> TokenLayout:
    T, H, W = given["hidden_states"].shape[2:]
    p, mask = config.patch_size, given["encoder_attention_mask"]
    # The model drops padding by itself and attends entry by entry of the batch.
    return TokenLayout(((T, H // p, W // p),), text=mask.shape[1], real=counts(mask))


def _sd3(config: Any, given: Arguments) -> TokenLayout:
    H, W = given["hidden_states"].shape[-2:]
    p = config.patch_size
    return TokenLayout(((1, H // p, W // p),), text=given["encoder_hidden_states"].shape[1])


FLUX = Family(_flux, ("attn",))  # and what was made from it
FLUX_2 = Family(_flux_2, ("attn",))
FLUX_3 = Family(
    _flux_3, ("attn",), parts=("single_transformer_blocks",)
)  # the blocks before attend to one kind each
CHROMA = Family(_chroma, ("attn",))
QWEN_IMAGE = Family(_qwen_image, ("attn",))
KREA_2 = Family(_krea_2, ("attn",))
COGVIEW_4 = Family(_cogview_4, ("attn1",))
Z_IMAGE = Family(_z_image, ("attention",), rising=True, parts=("layers",), timestep=lambda given: given["t"])
ERNIE_IMAGE = Family(_ernie_image, ("self_attention",))
HUNYUAN_IMAGE = Family(_hunyuan_image, ("attn",))
HUNYUAN_VIDEO = Family(_hunyuan_video, ("attn",))
HUNYUAN_VIDEO_15 = Family(_hunyuan_video_15, ("attn",))
MOTIF_VIDEO = Family(_motif_video, ("attn",))
COGVIDEOX = Family(_cogvideox, ("attn1",))
MOCHI = Family(_mochi, ("attn1",), rising=True)
SD_3 = Family(_sd3, ("attn", "attn2"))


def _minimax_h3(_: Any, given: Arguments) -> TokenLayout | None:
    """`[text | frames that are given, references | audio | video]`: the video is the last run of video rows."""
    rows, tokens = given["video_indices"].cpu(), given["token_tags"].shape[0]
    step = given["timestep_indices"].cpu()[rows]
    others = ((rows[1:] != rows[:-1] + 1) | (step[1:] != step[:-1])).nonzero()
    video = rows[int(others[-1]) + 1 :] if len(others) else rows
    grid = _grid_of(given["position_ids"].cpu()[video])
    return grid and TokenLayout((grid,), text=tokens - len(video), before=int(video[0]), together=True)


def _of_the_video(given: Arguments) -> Any:
    """References and audio have their own timesteps."""
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
    if len(grids) > 1 or not torch.equal(rows, torch.arange(first, first + len(rows), device="cpu")):
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

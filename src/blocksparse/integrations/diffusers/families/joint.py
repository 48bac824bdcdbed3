"""Transformers that join text with a picture or a video in one sequence, at one end of it."""

from __future__ import annotations

from typing import Any

import torch

from blocksparse.integrations.diffusers.families.family import (
    Arguments,
    Family,
    checked,
    counts,
    grids_of,
    padding_ends,
    patches,
)
from blocksparse.integrations.token_layout import TokenLayout


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
    """References stand behind the picture, with positions of their own."""
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
    of_text = mask[:, : layout.text].bool()
    return (
        TokenLayout(layout.grids, layout.text, layout.before, counts(of_text)) if padding_ends(of_text) else None
    )


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

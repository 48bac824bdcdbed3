"""How diffusers' transformers lay out their tokens, read from the arguments of their forward calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import a, flag
from blocksparse.integrations.diffusers.token_layout import Sizes, TokenLayout

Arguments = Mapping[str, Any]
"""The arguments of a forward call by name, those with defaults included."""


@final
@frozen(eq=False)
class Family:
    """What must be known of a transformer before its attention may become sparse.

        Family(lambda config, given: TokenLayout((given["hidden_states"].shape[2:],)), attention=("attn1",))

    Args:
        layout: a function of the model's config and of the arguments of a forward call by name, which gives the
            `TokenLayout`; or None where the arguments do not say it, and then all attention of the call is dense.
        attention: the names, inside a block of the model, of its attention over pictures: alone, or joined with
            text. Other attention, as over text alone, stays as it is.
        rising: whether timesteps rise from noise to picture.
    """

    layout: Callable[[Any, Arguments], TokenLayout | None]
    attention: tuple[str, ...] = field(validator=a(tuple))
    rising: bool = field(default=False, validator=flag)


def _wan(config: Any, given: Arguments) -> TokenLayout:
    return TokenLayout((_patches(given["hidden_states"].shape[2:], config.patch_size),))


def _ltx(_: Any, given: Arguments) -> TokenLayout | None:
    grid = given["num_frames"], given["height"], given["width"]
    tokens = given["hidden_states"].shape[1]
    return _checked((grid,), tokens) if None not in grid else None


def _flux(_: Any, given: Arguments) -> TokenLayout | None:
    """Flux and Flux 2: pictures are known by the position of each token, `[N, 3]` or `[N, 4]`."""
    ids = given["img_ids"]
    grids = _grids_of(ids[0] if ids.ndim == 3 else ids)
    text = given["encoder_hidden_states"].shape[1]
    if grids is None:
        return None
    return _checked(grids, given["hidden_states"].shape[1], text=text, text_first=True)


def _flux_2(config: Any, given: Arguments) -> TokenLayout | None:
    # With a cache, tokens of reference pictures are keys only, or attend among themselves.
    return None if given["kv_cache_mode"] is not None else _flux(config, given)


def _qwen_image(_: Any, given: Arguments) -> TokenLayout | None:
    shapes, text, mask = given["img_shapes"], given["encoder_hidden_states"], given["encoder_hidden_states_mask"]
    if not shapes:
        return None
    first, *others = ([shape] if isinstance(shape[0], int) else shape for shape in shapes)
    if any(list(other) != list(first) for other in others):
        return None
    real = None
    if mask is not None:
        mask = mask.bool()
        real = _counts(mask)
        # Padding inside the text is left to the model's own mask.
        place = torch.arange(mask.shape[1], device=mask.device)
        if not torch.equal(place < mask.sum(dim=1, keepdim=True), mask):
            return None
    grids = tuple((int(T), int(H), int(W)) for T, H, W in first)
    return _checked(grids, given["hidden_states"].shape[1], text=text.shape[1], text_first=True, real=real)


def _hunyuan_video(config: Any, given: Arguments) -> TokenLayout:
    grid = _patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    mask = given["encoder_attention_mask"]
    return TokenLayout((grid,), text=given["encoder_hidden_states"].shape[1], real=_counts(mask))


def _hunyuan_video_15(config: Any, given: Arguments) -> TokenLayout:
    """Text, glyphs and picture embeddings stand behind the video, the padding of all of them at the end."""
    grid = _patches(given["hidden_states"].shape[2:], (config.patch_size_t, config.patch_size, config.patch_size))
    masks = given["encoder_attention_mask"].bool(), given["encoder_attention_mask_2"].bool()
    image = given["image_embeds"]
    seen = 0 if bool((image == 0).all()) else image.shape[1]
    return TokenLayout(
        (grid,),
        text=masks[0].shape[1] + masks[1].shape[1] + image.shape[1],
        real=tuple(one + two + seen for one, two in zip(*map(_counts, masks), strict=True)),
    )


def _cogvideox(config: Any, given: Arguments) -> TokenLayout:
    T, _, H, W = given["hidden_states"].shape[1:]
    p, p_t = config.patch_size, config.patch_size_t
    frames = T if p_t is None else (T + p_t - 1) // p_t
    return TokenLayout(((frames, H // p, W // p),), text=given["encoder_hidden_states"].shape[1], text_first=True)


def _mochi(config: Any, given: Arguments) -> TokenLayout:
    T, H, W = given["hidden_states"].shape[2:]
    p, mask = config.patch_size, given["encoder_attention_mask"]
    # The model drops padding by itself and attends entry by entry of the batch.
    return TokenLayout(((T, H // p, W // p),), text=mask.shape[1], real=_counts(mask))


def _sd3(config: Any, given: Arguments) -> TokenLayout:
    H, W = given["hidden_states"].shape[-2:]
    p = config.patch_size
    return TokenLayout(((1, H // p, W // p),), text=given["encoder_hidden_states"].shape[1])


FAMILIES: Mapping[str, Family] = {
    "WanTransformer3DModel": Family(_wan, ("attn1",)),
    "LTXVideoTransformer3DModel": Family(_ltx, ("attn1",)),
    "FluxTransformer2DModel": Family(_flux, ("attn",)),
    "Flux2Transformer2DModel": Family(_flux_2, ("attn",)),
    "QwenImageTransformer2DModel": Family(_qwen_image, ("attn",)),
    "HunyuanVideoTransformer3DModel": Family(_hunyuan_video, ("attn",)),
    "HunyuanVideo15Transformer3DModel": Family(_hunyuan_video_15, ("attn",)),
    "CogVideoXTransformer3DModel": Family(_cogvideox, ("attn1",)),
    "MochiTransformer3DModel": Family(_mochi, ("attn1",), rising=True),
    "SD3Transformer2DModel": Family(_sd3, ("attn", "attn2")),
}
"""The transformers that are known, by the names of their classes."""


def _patches(sizes: Any, patch: Any) -> Sizes:
    T, H, W = (int(size) // int(step) for size, step in zip(sizes, patch, strict=True))
    return T, H, W


def _counts(mask: Tensor) -> tuple[int, ...]:
    """The number of real tokens in each entry of a batch, from a mask `[B, text]`. The host waits for it."""
    counts: list[int] = mask.sum(dim=1, dtype=torch.int64).tolist()
    return tuple(counts)


def _checked(grids: tuple[Any, ...], tokens: int, **text: Any) -> TokenLayout | None:
    """The layout, if the grids have as many cells as there are tokens."""
    layout = TokenLayout(tuple(tuple(map(int, grid)) for grid in grids), **text)  # type: ignore[misc]
    return layout if layout.cells == tokens else None


def _grids_of(ids: Tensor) -> tuple[Sizes, ...] | None:
    """The grids whose cells have these coordinates `[N, 3 or more]`: picture (or frame), row, column.

    None if the tokens are not one whole grid after the other, row by row. The host waits for the coordinates.
    """
    places, grids = ids[:, :3].float().cpu(), []
    _, lengths = places[:, 0].unique_consecutive(return_counts=True)
    for picture in places[:, 1:].split(lengths.tolist()):
        rows, columns = picture[:, 0].unique(), picture[:, 1].unique()
        if not torch.equal(picture, torch.cartesian_prod(rows, columns)):
            return None
        grids.append((1, len(rows), len(columns)))
    return tuple(grids)

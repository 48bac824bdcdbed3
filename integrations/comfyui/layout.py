"""Where the tokens of a picture stand in the attention of ComfyUI's models, as far as these say it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, final

from attrs import frozen
from torch import Tensor

from blocksparse.hosts.token_layout import Sizes, TokenLayout

_TEXT_BEHIND = ("HunyuanVideo",)  # by the names of models' classes, where they do not say it in their options
_TEXT_FIRST = ("Flux", "Chroma", "QwenImageTransformer2DModel")  # these put references behind the picture


@final
@frozen
class Latents:
    """What a forward call was given, as far as it says where tokens stand.

    Args:
        model: the name of the model's class.
        grid: frames, rows and columns in tokens; None where latents are of another kind.
        references: whether pictures beside the one that is made are given.
    """

    model: str
    grid: Sizes | None
    references: bool

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any]) -> Latents:
        """Read the arguments of a forward call, by name and in the order of its signature.

        The first are the latents: `[B, C, T, H, W]` or `[B, C, H, W]`, or a list that begins with the video's.
        """
        x = next(iter(given.values()))
        x = x[0] if isinstance(x, list | tuple) else x
        patch = getattr(model, "patch_size", 1)
        patch = (1, patch, patch) if isinstance(patch, int) else (1, *patch)[-3:]
        grid = None
        if x.ndim in (4, 5):
            T, H, W = (-(-size // step) for size, step in zip((1, *x.shape[2:])[-3:], patch, strict=True))
            grid = T, H, W
        references = any(
            "ref" in name and (isinstance(value, Tensor) or (isinstance(value, list | tuple) and len(value) > 0))
            for name, value in given.items()
        )
        return cls(type(model).__name__, grid, references)


def token_layout(latents: Latents, options: Mapping[str, Any], tokens: int) -> TokenLayout | None:
    """The layout of attention over so many tokens in a forward call with these options; None if not known."""
    packed = options.get("minimax_h3_layout")
    if packed is not None:
        return _minimax_h3(packed, tokens)
    if (sizes := options.get("grid_sizes")) is not None:  # Wan
        grid = tuple(map(int, sizes))
        others = tokens - prod(grid)
        # A reference that was made into tokens of its own stands first, and only in the plain model.
        fits = not others or (others > 0 and latents.model == "WanModel")
        return TokenLayout((grid,), text=others, before=others) if fits else None  # type: ignore[arg-type]
    if latents.grid is None:
        return None
    others = tokens - prod(latents.grid)
    if others == 0:
        return TokenLayout((latents.grid,))
    if others < 0 or (latents.references and latents.model not in _TEXT_FIRST):
        return None
    if (pictures := options.get("img_slice")) is not None:
        first, end = map(int, pictures)
        if end == tokens and first <= others:  # references stand behind the picture, and are kept
            return TokenLayout((latents.grid,), text=others, before=first)
        return None
    if latents.references or latents.model not in (*_TEXT_FIRST, *_TEXT_BEHIND):
        return None
    return TokenLayout((latents.grid,), text=others, before=others if latents.model in _TEXT_FIRST else 0)


def _minimax_h3(packed: Any, tokens: int) -> TokenLayout | None:
    """Text, given frames and sound stand before the video, which is the last segment."""
    if packed.seq_len != tokens:
        return None
    first, end, kind = packed.segments[-1]
    _, frames, rows, columns, _ = packed.signature
    grid = int(frames), int(rows) // 2, int(columns) // 2
    if kind != "video" or end != tokens or prod(grid) != end - first:
        return None
    return TokenLayout((grid,), text=first, before=first)

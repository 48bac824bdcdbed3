"""Sizes of grids and tiles. `triton.cdiv` and its like take the host microseconds a call."""

from __future__ import annotations

import torch

FAR = 2**30
"""Farther than any two positions are from each other. A position and so many more still fit an int32."""

ROOM = 1024
"""Tokens, or cells, that a block is given room for however short the prompt is; a larger one has no more than that."""


def cdiv(n: int, size: int) -> int:
    """How many pieces of `size` cover `n`."""
    return -(-n // size)


def index_dtype(cols: int) -> torch.dtype:
    """That of lists over `cols` blocks. They are as large as the mask: int16 where it holds every block's number."""
    return torch.int16 if cols < 2**15 else torch.int32


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, which is at least 1."""
    return 1 << (n - 1).bit_length()

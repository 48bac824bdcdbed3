"""Sizes of grids and tiles, in plain Python: `triton.cdiv` and its like take the host microseconds a call."""

from __future__ import annotations

import torch

FAR = 2**30
"""A distance greater than that of any two positions. A position plus `FAR` still fits an int32."""

ROOM = 1024
"""The least number of tokens, or of cells, that a block is given room for, however short the prompt is.

A block larger than both that and the prompt is cut to the larger of the two, and takes no more memory.
"""

REMEMBERED = 4096
"""For how many shapes what follows from a shape alone is kept, so that calls need not work it out again."""


def cdiv(n: int, size: int) -> int:
    """How many pieces of size `size` cover `n`."""
    return -(-n // size)


def index_dtype(cols: int) -> torch.dtype:
    """The dtype of lists over `cols` blocks, which are as large as the mask: int16 if it holds every block's number."""
    return torch.int16 if cols < 2**15 else torch.int32


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, which is at least 1."""
    return 1 << (n - 1).bit_length()


def padded_keys(D: int) -> int:
    """The head dim of queries and keys as the kernels for Hopper hold it: whole panels, which are of 64 columns."""
    return cdiv(D, 64) * 64


def padded_values(Dv: int) -> int:
    """That of values: a power of two as well, since their sums lie in registers, where Triton has no other lengths."""
    return max(power_of_2(Dv), 64)

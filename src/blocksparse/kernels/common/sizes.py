"""What sizes decide: rounded numbers, memory for results, and the heads that a kernel is asked for.

It is plain Python, since `triton.cdiv` and its like take the host microseconds a call.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

FAR = 2**30
"""A distance greater than that of any two positions. A position plus `FAR` still fits an int32."""

ROOM = 1024
"""The least number of tokens, or of cells, that a block is given room for, however short the prompt is.

A block larger than both that and the prompt is cut to the larger of the two, and takes no more memory.
"""

REMEMBERED = 4096
"""For how many shapes what follows from a shape alone is kept, so that calls need not work it out again."""


def cdiv(n: int, size: int) -> int:
    """Number of pieces of size `size` that cover `n`."""
    return -(-n // size)


def index_dtype(cols: int) -> torch.dtype:
    """The dtype of lists over `cols` blocks, which are as large as the mask: int16 if it holds every block's number."""
    return torch.int16 if cols < 2**15 else torch.int32


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, which is at least 1."""
    return 1 << (n - 1).bit_length()


def padded_keys(D: int) -> int:
    """The head dim of queries and keys as the kernels for Hopper hold it: whole TMA boxes, which are of 64 columns."""
    return cdiv(D, 64) * 64


def padded_values(Dv: int) -> int:
    """That of values: a power of two as well, since their sums lie in registers, where Triton has no other lengths."""
    return max(power_of_2(Dv), 64)


def empty_as(q: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised `[B, H, M, width]` whose axes lie in the order of those of `q` `[B, H, M, D]`.

    Callers often hold the axis of heads behind that of tokens, and need not move what attention gives them. The result is
    contiguous if the last axis of `q` is not innermost, or if entries of `q` share memory, since kernels write whole rows,
    and no entry twice.
    """
    B, H, M, _ = q.shape
    if q.is_contiguous():
        return q.new_empty((B, H, M, width), dtype=dtype)
    if q.transpose(1, 2).is_contiguous():  # every call of such a caller comes here
        return q.new_empty((B, M, H, width), dtype=dtype).transpose(1, 2)
    shared = any(stride == 0 and size > 1 for size, stride in zip(q.shape, q.stride(), strict=True))
    axes = [0, 1, 2]
    if q.stride(-1) == 1 and not shared:
        axes.sort(key=q.stride, reverse=True)
    memory = q.new_empty((*(q.shape[axis] for axis in axes), width), dtype=dtype)
    return memory.permute(*(axes.index(axis) for axis in range(3)), 3)


def empty_together(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Uninitialised contiguous tensors of these shapes in one allocation, which takes the host longer than a view of it.

    Each begins at a multiple of 16 bytes, as one with separate memory does: Triton specialises kernels on that.
    """
    entries, places = _together(shapes, dtype.itemsize)
    memory = torch.empty(entries, dtype=dtype, device=device)
    return [memory.as_strided(*place) for place in places]


_Place = tuple[tuple[int, ...], tuple[int, ...], int]


@functools.lru_cache(maxsize=REMEMBERED)
def _together(shapes: tuple[tuple[int, ...], ...], in_bytes: int) -> tuple[int, list[_Place]]:
    """How many entries there are in all; and the shape, the strides and the first entry of each tensor."""
    first, places = 0, []
    for shape in shapes:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append((shape, strides, first))
        first += cdiv(math.prod(shape) * in_bytes, 16) * 16 // in_bytes
    return first, places


def for_heads(x: Tensor, heads: int) -> Tensor:
    """`x` `[B, H, ...]` with each of its heads repeated up to `heads`; as it is where one serves all, or `H` is `heads`."""
    H = x.shape[1]
    return x if H in (1, heads) else x.repeat_interleave(heads // H, dim=1)


def copies_in_bulk(x: Tensor) -> bool:
    """Whether tensor descriptors can read `x`: rows are contiguous and aligned to 16 bytes, and no entries share memory."""
    return x.data_ptr() % 16 == 0 and _copies_in_bulk(x.shape, x.stride(), x.element_size())


@functools.lru_cache(maxsize=REMEMBERED)
def _copies_in_bulk(shape: tuple[int, ...], strides: tuple[int, ...], in_bytes: int) -> bool:
    *outer, inner = strides
    return inner == 1 and not any(
        step * in_bytes % 16 or (step == 0 and size > 1) for size, step in zip(shape, outer, strict=False)
    )


def for_bulk_copies(x: Tensor) -> Tensor:
    """`x` as tensor descriptors can read it, a copy only if it must be; rows have to be multiples of 16 bytes."""
    # `contiguous` would not do: it keeps odd strides of axes of one entry, and memory that is not aligned.
    return x if copies_in_bulk(x) else x.clone(memory_format=torch.contiguous_format)


class HeadMask(NamedTuple):
    """The heads whose number is below a bound, or with `others` the heads where it is not; a NaN is not.

    A kernel that is told so leaves the other heads out, without the host knowing which they are.
    """

    number: Tensor  # [B, H]
    bound: Tensor  # [1, H|1, 1, 1] float64
    others: bool = False

    def rest(self) -> HeadMask:
        """The heads that these are not."""
        return self._replace(others=not self.others)

    def these(self) -> Tensor:
        """`[B, H, 1, 1]` bool, in plain torch."""
        below = self.number[..., None, None] < self.bound
        return ~below if self.others else below


Heads = HeadMask | None
"""The heads that are asked for: all if None."""

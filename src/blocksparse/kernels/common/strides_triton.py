"""Strides that change with the prompt's length, handed over so that a kernel need not be compiled anew.

Triton specialises a kernel on each integer argument: it compiles anew when the integer becomes 1, a multiple of 16, or
neither. It can be told not to specialise on an argument, but always does so on entries of a tuple. Strides of q, k and v
are multiples of the head dim, and keep their kind whatever the length; those of lists, masks and scores do not. So these
are multiplied by 16 (`alike`), and the kernel divides by 16 again (`head_at`).
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import REMEMBERED


def alike(*strides: int) -> tuple[int, ...]:
    """Sixteen times each stride: all are then multiples of 16, and the kernel is compiled once."""
    return tuple([16 * stride for stride in strides])


def head_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of the first two axes, 0 for an axis of one entry, which holds for all."""
    return _head_strides(x.shape, x.stride())


@functools.lru_cache(maxsize=REMEMBERED)  # shapes alone decide them, and kernels ask for them in every call
def _head_strides(shape: tuple[int, ...], of_memory: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([0 if size == 1 else stride for size, stride in zip(shape[:2], of_memory[:2], strict=True)])


@triton.jit
def head_at(strides, b, h):
    """The offset at which a head begins, from strides as `alike` gives them."""
    return b.to(tl.int64) * (strides[0] >> 4) + h.to(tl.int64) * (strides[1] >> 4)

"""Strides that change with the prompt's length, so that a kernel need not be compiled anew for each kind of them.

Triton compiles a kernel for every combination of integers that are 1, multiples of 16, or neither; it can be told not to
look at an argument, but looks at every entry of a tuple. Strides of q, k and v, multiples of the head dim, keep their
kind whatever the length. Those of lists, masks and scores do not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def alike(*strides: int) -> tuple[int, ...]:
    """Strides of which all are of one kind: sixteen times each."""
    return tuple([16 * stride for stride in strides])


def head_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of the first two axes, 0 where one entry holds for all."""
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)])


@triton.jit
def head_at(strides, b, h):
    """Where a head begins, of strides that are `alike`."""
    return b.to(tl.int64) * (strides[0] >> 4) + h.to(tl.int64) * (strides[1] >> 4)

"""A bijection of 32-bit numbers, for Python and plain torch; the Triton kernels have their own with the same results."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

_MASK = 2**32 - 1
Numbers = TypeVar("Numbers", int, Tensor)


def mix(x: Numbers) -> Numbers:
    """A bijection of 32-bit numbers, as int or int64: two rounds of shift, xor and multiply (C. Wellons' hash-prospector).

    Both factors are below 2^31, so a product fits int64; the number added first keeps 0 from being its own hash.
    """
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)

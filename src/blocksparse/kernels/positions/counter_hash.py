"""Pseudo-random numbers that depend on what they are drawn for, and on nothing else."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus

_MASK = 2**32 - 1
Numbers = TypeVar("Numbers", int, Tensor)


def mix(x: Numbers) -> Numbers:
    """A bijection of 32-bit numbers, as int or int64: two rounds of shift, xor and multiply (C. Wellons' hash-prospector).

    Both factors are below 2^31, so a product fits int64; the number added first keeps 0 from being its own hash. Triton
    kernels have their own with the same results.
    """
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


@on_gpus(
    of=lambda seed, *counters: counters[0],
    where=lambda seed, *counters: len(counters) <= 3 and max(x.ndim for x in counters) <= 3,
)
def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """32 mixed bits for every combination of counters, int64 in [0, 2^32), in the shape they broadcast to.

    Each counter is hashed by itself and folded into the hash of those before it, so numbers are uniform along
    every axis, whatever steps the counters take. All arithmetic is on integers, so every device gives the same bits. On
    a GPU one launch serves up to three counters of up to three axes; everything else takes the plain torch below.

    Args:
        seed: non-negative and below 2^32.
        counters: int64, non-negative and below 2^32; at least one.
    """
    state: Any = mix(seed)  # no product overflows int64
    for counter in counters:
        state = mix(mix(counter) ^ state)
    result: Tensor = state
    return result

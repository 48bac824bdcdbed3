"""Pseudo-random numbers that depend on what they are drawn for, and on nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blocksparse.kernels.positions.mix import mix


def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """32 mixed bits for every combination of counters, int64 in [0, 2^32), in the shape they broadcast to.

    Each counter is hashed by itself and folded into the hash of those before it, so numbers are uniform along
    every axis, whatever steps the counters take. All arithmetic is on integers, so every device gives the same bits. On
    a GPU one launch serves up to three counters of up to three axes; everything else takes the plain torch below.

    Args:
        seed: non-negative and below 2^32.
        counters: int64, non-negative and below 2^32; at least one.
    """
    if counters[0].is_cuda and len(counters) <= 3 and max(x.ndim for x in counters) <= 3:
        from blocksparse.kernels.positions.counter_hash_triton import counter_hash_triton

        return counter_hash_triton(seed, *counters)
    return counter_hash_reference(seed, *counters)


def counter_hash_reference(seed: int, *counters: Tensor) -> Tensor:
    """The same in plain torch, in which no product overflows int64."""
    state: Any = mix(seed)
    for counter in counters:
        state = mix(mix(counter) ^ state)
    result: Tensor = state
    return result

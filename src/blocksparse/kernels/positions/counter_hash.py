"""Pseudo-random numbers that depend on what they are drawn for, and on nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.mix import mix


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

"""Pseudo-random numbers that depend on what they are drawn for, and on nothing else."""

from __future__ import annotations

from typing import TypeVar

import torch
from attrs import validators
from torch import Tensor

from blocksparse.scorers.grid import Grid

IntT = TypeVar("IntT", int, Tensor)
BITS = 32
_MASK = 2**BITS - 1

seed = [validators.instance_of(int), validators.ge(0), validators.le(_MASK)]
"""Validator of a seed: 32 bits."""


def counter_hash(seed: int, *counters: Tensor) -> Tensor:
    """32 mixed bits for every combination of counters, int64 in [0, 2^32), in the shape they broadcast to.

    Each counter is hashed by itself and folded into the hash of those before it, so numbers are uniform along
    every axis, whatever steps the counters take. Integer arithmetic alone, without overflow: the
    same bits on every device. Counters are non-negative and below 2^32.
    """
    state: int | Tensor = _mix(seed)
    for counter in counters:
        state = _mix(_mix(counter) ^ state)
    return torch.as_tensor(state)


def _mix(x: IntT) -> IntT:
    """A bijection of 32 bits: two rounds of shift, xor and multiply (constants of C. Wellons' hash-prospector).

    Both factors are below 2^31, so a product fits int64; the sum keeps 0 from being its own hash.
    """
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def block_indices(grid: Grid, *, of_chunk: bool = False) -> tuple[Tensor, Tensor]:
    """Index of every row, `[rows, 1]`, and of every column, `[cols]`, int64.

    Rows are counted in the whole prompt, so that a block has the same index however the prompt is chunked, or
    from the start of the chunk if `of_chunk`.
    """
    device = grid.q_position.device
    skipped = (grid.k_len - grid.q_len) // grid.q_block if grid.causal and not of_chunk else 0
    rows = torch.arange(skipped, skipped + grid.rows, device=device)
    return rows.unsqueeze(1), torch.arange(grid.cols, device=device)

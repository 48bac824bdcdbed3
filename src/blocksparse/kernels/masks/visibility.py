"""Masks that follow from positions, and from random numbers drawn by position."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept, BlockGrid, last_from

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
        counters: int64, non-negative and below 2^32. At least one.
    """
    state: Any = mix(seed)  # no product overflows int64
    for counter in counters:
        state = mix(mix(counter) ^ state)
    result: Tensor = state
    return result


@on_gpus(of=lambda keep, grid, *_, **__: grid.q_first)
def keep_visible(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    always: AlwaysKept = NO_BLOCKS,
    segment: int | None = None,
    diagonal: bool = False,
) -> Tensor:
    """The blocks of `grid` that `keep` or a number chooses and some query can see, `[B|1, H|1, rows, cols]` bool.

    On a GPU it is one launch; other devices take the plain torch below. An axis of batch entries or heads along which
    neither `keep` nor the positions differ has one entry.

    Args:
        keep: bool, each entry for `n` x `n` blocks of `grid`: `[B|1, H|1, ceil((rows + skipped) / n), ceil(cols / n)]`.
            If `n` is 1, its last axes may be 1, and those before them may be missing. None chooses no block.
        skipped: first rows of `keep` that are not part of `grid`.
        always: further blocks that are chosen by position.
        segment: a number of tokens. The blocks of `grid.own_segment(segment)` are chosen, too.
        diagonal: the blocks of `grid.diagonal` are chosen, too.
    """
    visible = grid.visible
    chosen = torch.zeros_like(visible) if keep is None else keep
    if n > 1:
        chosen = chosen.repeat_interleave(n, dim=-2).repeat_interleave(n, dim=-1)
        chosen = chosen[..., skipped : skipped + visible.shape[-2], : visible.shape[-1]]
    if always.near is not None:
        chosen = chosen | grid.within(always.near)
    if always.first is not None:
        chosen = chosen | grid.holding_first(always.first)
    if always.stride is not None:
        chosen = chosen | every(*always.stride, grid)
    if always.last is not None:
        chosen = chosen | (grid.q_last >= last_from(always.last, grid))
    if segment is not None:
        chosen = chosen | grid.own_segment(segment)
    return (chosen | grid.diagonal if diagonal else chosen) & visible


def every(eta: int, seed: int, grid: BlockGrid) -> Tensor:
    """One of every `eta` blocks of a row, from an offset drawn for the row, `[1, 1, rows, cols]` bool."""
    eta, rows, cols = min(eta, FAR), grid.q_first.shape[2], grid.k_first.shape[3]
    i = torch.arange(grid.first_row, grid.first_row + rows, device=grid.q_first.device)
    j = torch.arange(cols, device=i.device)
    # A column is chosen if its sum with the row's hash is a multiple of eta. Both are reduced modulo eta before they are
    # broadcast against each other, so that the only operation over all blocks is one comparison.
    return (j % eta == -counter_hash(seed, i).unsqueeze(1) % eta)[None, None]


@on_gpus()
def any_head(keep: Tensor, heads: int) -> Tensor:
    """The blocks of `keep` `[B, H, rows, cols]` bool that any of `H / heads` heads keeps, `[B, heads, rows, cols]`."""
    kept: Tensor = keep.unflatten(1, (heads, -1)).any(2)
    return kept


@on_gpus()
def visited_columns(keep: Tensor, heads: int) -> Tensor:
    """The key blocks that kernels may read with the lists of `keep` `[B, H, rows, cols]`, `[B, heads, cols]` bool.

    These are the blocks that any row of any of the `H / heads` heads keeps, and block 0, since the lists of rows without
    any name that one.
    """
    visited: Tensor = keep.unflatten(1, (heads, -1)).any((2, 3))
    visited[..., 0] = True
    return visited

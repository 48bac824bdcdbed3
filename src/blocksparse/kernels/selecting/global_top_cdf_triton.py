"""The Triton kernels of `global_top_cdf`: a search for the lightest block taken, in passes over all blocks of a head.

The search knows a range of weights in which that block's weight lies. A pass divides the range by seven bounds into eight
parts, and adds up for each bound the weights above it; the next pass starts from the part in which the sum crosses the
target. Programs add their parts of a sum with integer atomics, so that it does not matter which comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    diagonal_blocks,
    load_positions,
    positions,
    reachable_blocks,
    rows_at,
    strides,
    tile_of_blocks,
    tile_of_grid,
)
from blocksparse.kernels.selecting.top_cdf_triton import limit_of, ticks_of, weights_of
from blocksparse.runtime.device import device_of
from blocksparse.runtime.launches import remembered

_TILE = 4096  # blocks per program
_PASSES = 11  # enough to divide the range from -1 to 2^30 by eight until one number is left
_MOST = tl.constexpr(1 << 30)


def global_top_cdf_triton(
    values: Tensor, forced: Tensor | None, mass: Tensor, grid: BlockGrid, *, crossing: bool
) -> Tensor:
    """Launch the kernels; arguments as of `global_top_cdf`."""
    B, H, rows, cols = values.shape
    n, device = rows * cols, values.device
    tile = tile_of_blocks(_TILE)
    over_grid = cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B
    in_line = cdiv(n, _TILE), H, B
    where = (*positions(grid), rows, cols)
    tiling = {"CAUSAL": grid.causal, "WINDOW": grid.window, **tile, "num_warps": 4}

    ticks = torch.empty((B, H, n), dtype=torch.int32, device=device)
    zeros = torch.empty((3 + 8 * _PASSES, B, H), dtype=torch.int64, device=device).zero_()  # one fill for all
    total, above, heaviest = zeros[0], zeros[1], zeros[2].view(torch.int32)  # `heaviest` has room to spare
    sums = zeros[3:].view(_PASSES, B, H, 8)
    lightest = torch.empty((B, H), dtype=torch.int32, device=device)
    bounds = torch.empty((_PASSES, B, H, 2), dtype=torch.int32, device=device)
    ties = torch.empty((B, H, in_line[0]), dtype=torch.int32, device=device)
    keep = torch.empty(values.shape, dtype=torch.bool, device=device)
    mass_stride = head_strides(mass)[1]
    with device_of(values):
        _heaviest[over_grid](values, heaviest, strides(values), *where, **tiling)
        _to_ticks[over_grid](values, heaviest, ticks, total, strides(values), *where, **tiling)
        for i in range(_PASSES):
            last = (bounds[i - 1], sums[i - 1]) if i else (None, None)
            _search[in_line](
                ticks, total, mass, mass_stride, *last, bounds[i], sums[i], n,
                CROSSING=crossing, TILE=_TILE, num_warps=4,
            )  # fmt: skip
        _count[in_line](
            ticks, total, mass, mass_stride, bounds[-1], sums[-1], lightest, above, ties, n,
            CROSSING=crossing, TILE=_TILE, num_warps=4,
        )  # fmt: skip
        _keep[in_line](
            ticks, total, mass, mass_stride, lightest, above, ties, keep, n,
            CROSSING=crossing, TILE=_TILE, num_warps=4,
        )  # fmt: skip
        _finish[over_grid](
            keep, forced, mass, mass_stride, strides(keep), None if forced is None else strides(forced), *where,
            **tiling,
        )  # fmt: skip
    return keep


@triton.jit
def _reachable_weights(
    values_ptr, values_strides, positions, position_strides, b, h, row, col, there, inside,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Weights of the blocks of a launch tile; 0 where no query sees a key."""
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    at = rows_at(values_ptr, values_strides, b, h, row) + col * values_strides[3]
    return weights_of(tl.load(at, mask=reachable, other=0.0))


@remembered
@triton.jit(do_not_specialize=["rows"])
def _heaviest(
    values_ptr, heaviest_ptr, values_strides, positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    weights = _reachable_weights(
        values_ptr, values_strides, positions, position_strides, b, h, row, col, there, there & (col < cols),
        CAUSAL, WINDOW,
    )  # fmt: skip
    bits = weights.to(tl.int32, bitcast=True)  # for numbers that are not negative, bits stand in the same order
    tl.atomic_max(heaviest_ptr + b * tl.num_programs(1) + h, tl.max(tl.max(bits, 1), 0))


@remembered
@triton.jit(do_not_specialize=["rows"])
def _to_ticks(
    values_ptr, heaviest_ptr, ticks_ptr, total_ptr, values_strides, positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    weights = _reachable_weights(
        values_ptr, values_strides, positions, position_strides, b, h, row, col, there, inside, CAUSAL, WINDOW
    )
    head = b * tl.num_programs(1) + h
    heaviest = tl.load(heaviest_ptr + head + tl.zeros([1, 1], tl.int32)).to(tl.float32, bitcast=True)
    ticks = ticks_of(weights, heaviest).to(tl.int32)
    tl.store(ticks_ptr + (head.to(tl.int64) * rows + row) * cols + col, ticks, mask=inside)
    tl.atomic_add(total_ptr + head, tl.sum(tl.sum(ticks.to(tl.int64), 1), 0))


@triton.jit
def _target(total_ptr, mass_ptr, mass_stride, head, h, CROSSING: tl.constexpr):
    """The target in ticks, `[1, 1]` int64: a block is taken while the sum is below it (`limit_of`)."""
    one = tl.zeros([1, 1], tl.int32)
    mass = tl.load(mass_ptr + h * mass_stride + one).to(tl.float32)
    return limit_of(tl.load(total_ptr + head + one), mass, CROSSING)


@triton.jit
def _part(bounds_ptr, sums_ptr, target, head):
    """The range after the last pass, as bounds `low` and `high` `[1, 1]`.

    The blocks that weigh more than `low` add up to the target or more, those that weigh more than `high` to less.
    """
    one = tl.zeros([1, 1], tl.int32)
    if bounds_ptr is None:  # before the first pass
        low, high = one - 1, one + _MOST
    else:
        at = head * 2 + one
        low, high = tl.load(bounds_ptr + at), tl.load(bounds_ptr + at + 1)
        part = 1 + tl.arange(0, 8)[None, :]  # the last bound is `high` itself
        sums = tl.load(sums_ptr + head * 8 + part - 1, mask=part < 8, other=0)
        bound = low + ((high - low).to(tl.int64) * part // 8).to(tl.int32)
        less = (sums < target) | (part == 8)
        first = tl.min(tl.where(less, bound, _MOST), 1, keep_dims=True)
        low = tl.max(tl.where(less, low, bound), 1, keep_dims=True)
        high = first
    return low, high


@remembered
@triton.jit(do_not_specialize=["n"])
def _search(
    ticks_ptr, total_ptr, mass_ptr, mass_stride, last_bounds_ptr, last_sums_ptr, bounds_ptr, sums_ptr, n,
    CROSSING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    head = tl.program_id(2) * tl.num_programs(1) + h
    target = _target(total_ptr, mass_ptr, mass_stride, head, h, CROSSING)
    low, high = _part(last_bounds_ptr, last_sums_ptr, target, head)
    one = tl.zeros([1, 1], tl.int32)
    at = bounds_ptr + head * 2 + one
    tl.store(at, low, mask=one + tl.program_id(0) == 0)
    tl.store(at + 1, high, mask=one + tl.program_id(0) == 0)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]  # a head may have over 2^31 blocks
    ticks = tl.load(ticks_ptr + head.to(tl.int64) * n + place, mask=place < n, other=0)
    for part in tl.static_range(1, 8):
        bound = low + ((high - low).to(tl.int64) * part // 8).to(tl.int32)
        more = tl.sum(tl.where(ticks > bound, ticks, 0).to(tl.int64), 1, keep_dims=True)
        tl.atomic_add(sums_ptr + head * 8 + part - 1 + one, more)


@remembered
@triton.jit(do_not_specialize=["n"])
def _count(
    ticks_ptr, total_ptr, mass_ptr, mass_stride, bounds_ptr, sums_ptr, lightest_ptr, above_ptr, ties_ptr, n,
    CROSSING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the weights above that of the lightest block taken, and counts the blocks that weigh as much, per program."""
    h = tl.program_id(1)
    head = tl.program_id(2) * tl.num_programs(1) + h
    low, lightest = _part(bounds_ptr, sums_ptr, _target(total_ptr, mass_ptr, mass_stride, head, h, CROSSING), head)
    one = tl.zeros([1, 1], tl.int32)
    tl.store(lightest_ptr + head + one, lightest, mask=one + tl.program_id(0) == 0)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]  # a head may have over 2^31 blocks
    ticks = tl.load(ticks_ptr + head.to(tl.int64) * n + place, mask=place < n, other=-1)
    more = tl.sum(tl.where(ticks > lightest, ticks, 0).to(tl.int64), 1, keep_dims=True)
    tl.atomic_add(above_ptr + head + one, more)
    same = tl.sum((ticks == lightest).to(tl.int32), 1, keep_dims=True)
    tl.store(ties_ptr + head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0) + one, same)


@remembered
@triton.jit(do_not_specialize=["n"])
def _keep(
    ticks_ptr, total_ptr, mass_ptr, mass_stride, lightest_ptr, above_ptr, ties_ptr, keep_ptr, n,
    CROSSING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    head = tl.program_id(2) * tl.num_programs(1) + h
    one = tl.zeros([1, 1], tl.int32)
    missing = _target(total_ptr, mass_ptr, mass_stride, head, h, CROSSING) - tl.load(above_ptr + head + one)
    lightest = tl.load(lightest_ptr + head + one)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]  # a head may have over 2^31 blocks
    ticks = tl.load(ticks_ptr + head.to(tl.int64) * n + place, mask=place < n, other=-1)
    tied = ticks == lightest
    before = tl.zeros([1, 1], tl.int64)
    for first in range(0, tl.program_id(0), TILE):
        program = first + tl.arange(0, TILE)[None, :]
        there = program < tl.program_id(0)
        ties = tl.load(ties_ptr + head.to(tl.int64) * tl.num_programs(0) + program, mask=there, other=0)
        before += tl.sum(ties.to(tl.int64), 1, keep_dims=True)
    rank = before + tl.cumsum(tied.to(tl.int32), 1) - (1 if CROSSING else 0)
    taken = (ticks > lightest) | (tied & (rank.to(tl.int64) * lightest.to(tl.int64) < missing))
    tl.store(keep_ptr + head.to(tl.int64) * n + place, taken, mask=place < n)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _finish(
    keep_ptr, forced_ptr, mass_ptr, mass_stride, keep_strides, forced_strides, positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Adds what is kept in any case to the blocks taken, and removes what is out of reach."""
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    at = rows_at(keep_ptr, keep_strides, b, h, row) + col
    keep = (tl.load(at, mask=inside, other=0) != 0) | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    keep = keep | (tl.load(mass_ptr + h * mass_stride + tl.zeros_like(row)).to(tl.float32) >= 1.0)
    if forced_ptr is not None:
        forced_at = rows_at(forced_ptr, forced_strides, b, h, row) + col * forced_strides[3]
        keep = keep | (tl.load(forced_at, mask=inside, other=0) != 0)
    tl.store(at, keep & reachable, mask=inside)

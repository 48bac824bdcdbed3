"""The Triton kernels of `global_top_cdf`: a search for the lightest block taken, in three passes over all blocks of a head.

A tick count is a whole number in fp32, so its bits, less those of 1.0, are a key of 28 bits that grows with it. A pass adds
up ticks by ten bits of the key, among the blocks whose higher bits are those of the lightest block taken. From these sums
the next pass knows the ten bits of that block. Programs add with integer atomics, so that it does not matter which comes
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import asked, head_strides, not_asked
from blocksparse.kernels.common.sizes import Heads, cdiv
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.masks.grid_triton import (
    any_of,
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    strides,
    tile_of_blocks,
    tile_of_grid,
    visible_blocks,
)
from blocksparse.kernels.select.top_cdf_triton import limit_of, ticks_of, weights_of
from blocksparse.launch.launches import remembered

_TILE = 4096  # blocks per program
_PASSES = 3
_BITS = tl.constexpr(10)  # of a key, in a pass
_SUMS = tl.constexpr(1 << 10)
_OF_HEAD = tl.constexpr(3 * (1 << 10) + 1)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


def global_top_cdf_triton(
    values: Tensor, forced: Tensor | None, mass: Tensor, grid: BlockGrid, *, crossing: bool, heads: Heads = None
) -> Tensor:
    """Launch the kernels; arguments as in `global_top_cdf`."""
    B, H, rows, cols = values.shape
    n, device = rows * cols, values.device
    tile = tile_of_blocks(_TILE)
    over_grid = cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B
    in_line = cdiv(n, _TILE), H, B
    only = asked(None if heads is None or heads.others else heads)
    where = (*positions(grid), rows, cols)
    tiling = {"CAUSAL": grid.causal, "WINDOW": grid.window}

    ticks = torch.empty((B, H, n), dtype=torch.float32, device=device)
    best = torch.empty((B, H, over_grid[0]), dtype=torch.float32, device=device)
    sums = torch.empty(
        (B, H, _OF_HEAD.value), dtype=torch.int64, device=device
    )  # those of each pass, then the total
    total, of_pass = sums[..., -1], [sums[..., i * _SUMS.value :] for i in range(_PASSES)]
    cuts = torch.empty((_PASSES - 1, B, H, 2), dtype=torch.int64, device=device)
    keep = torch.empty(values.shape, dtype=torch.bool, device=device)
    target = total, mass, head_strides(mass)[1]
    _heaviest[over_grid](*only, values, best, sums, strides(values), *where, **tiling, **tile, num_warps=4)
    _to_ticks[over_grid](
        *only, values, best, ticks, total, of_pass[0], strides(values), *where, **tiling, **tile, num_warps=4
    )
    for i in range(1, _PASSES):
        last = (None if i == 1 else cuts[i - 2]), of_pass[i - 1]
        now = cuts[i - 1], of_pass[i], n
        _search[in_line](*only, ticks, *target, *last, *now, CROSSING=crossing, PASS=i, TILE=_TILE, num_warps=4)
    _keep[in_line](
        *only, ticks, *target, cuts[-1], of_pass[-1], keep, forced, None if forced is None else strides(forced), *where,
        **tiling, CROSSING=crossing, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return keep


@triton.jit
def _visible_weights(
    values_ptr, values_strides, positions, position_strides, b, h, row, col, there, inside,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Weights of the blocks of a launch tile; 0 where no query sees a key."""
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    return weights_of(load_blocks(values_ptr, values_strides, b, h, row, col, visible, 0.0))


@remembered
@triton.jit(do_not_specialize=["rows"])
def _heaviest(
    number_ptr, bound_ptr, bound_stride, values_ptr, best_ptr, sums_ptr, values_strides, positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the greatest weight of each launch tile, and zeros for the sums to come."""
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    weights = _visible_weights(
        values_ptr, values_strides, positions, position_strides, b, h, row, col, there, there & (col < cols),
        CAUSAL, WINDOW,
    )  # fmt: skip
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    tl.store(best_ptr + head * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(weights, 1), 0))
    for start in range(tl.program_id(0) * _SUMS, _OF_HEAD, tl.num_programs(0) * _SUMS):
        at = start + tl.arange(0, _SUMS)
        tl.store(sums_ptr + head * _OF_HEAD + at, tl.zeros([_SUMS], tl.int64), mask=at < _OF_HEAD)


@triton.jit
def _key(ticks):
    """A number from 1 to 2^28 that grows with the ticks. 0 for no tick."""
    return tl.maximum(ticks.to(tl.int32, bitcast=True) - (_ONE - 1), 0)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _to_ticks(
    number_ptr, bound_ptr, bound_stride, values_ptr, best_ptr, ticks_ptr, total_ptr, sums_ptr, values_strides, positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the ticks, and adds them up: all of them, and by the highest bits of their keys."""
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    weights = _visible_weights(
        values_ptr, values_strides, positions, position_strides, b, h, row, col, there, inside, CAUSAL, WINDOW
    )
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    heaviest = tl.zeros([1, 1], tl.float32)
    for start in range(0, tl.num_programs(0), COLS):
        at = start + tl.arange(0, COLS)[None, :]
        best = tl.load(best_ptr + head * tl.num_programs(0) + at, mask=at < tl.num_programs(0), other=0.0)
        heaviest = tl.maximum(heaviest, tl.max(best, 1, keep_dims=True))
    ticks = ticks_of(weights, heaviest)
    tl.store(ticks_ptr + (head * rows + row) * cols + col, ticks, mask=inside)
    number = ticks.to(tl.int32).to(tl.int64)
    tl.atomic_add(total_ptr + head * _OF_HEAD, tl.sum(tl.sum(number, 1), 0))
    tl.atomic_add(sums_ptr + head * _OF_HEAD + (_key(ticks) >> (2 * _BITS)), number, mask=inside & (number > 0))


@triton.jit
def _cut(cuts_ptr, sums_ptr, total_ptr, mass_ptr, mass_stride, head, h, CROSSING: tl.constexpr):
    """The known bits of the lightest block's key, greater than any if all are taken, and the ticks missing, `[1, 1]`."""
    one = tl.zeros([1, 1], tl.int32)
    if cuts_ptr is None:  # after the first pass; a block is taken while the sum is below the target
        known = one.to(tl.int64)
        mass = tl.load(mass_ptr + h * mass_stride + one).to(tl.float32)
        missing = limit_of(tl.load(total_ptr + head * _OF_HEAD + one), mass, CROSSING)
    else:
        known, missing = tl.load(cuts_ptr + head * 2 + one), tl.load(cuts_ptr + head * 2 + 1 + one)
    bits = tl.arange(0, _SUMS)[None, :]
    sums = tl.load(sums_ptr + head * _OF_HEAD + bits)
    above = tl.sum(sums, 1, keep_dims=True) - tl.cumsum(sums, 1)  # of the blocks with greater bits
    best = tl.min(tl.where(above < missing, bits, _SUMS), 1, keep_dims=True)
    taken = tl.sum(tl.where(bits > best, sums, 0), 1, keep_dims=True)
    return (known << _BITS) + best, missing - taken


@remembered
@triton.jit(do_not_specialize=["n"])
def _search(
    number_ptr, bound_ptr, bound_stride, ticks_ptr, total_ptr, mass_ptr, mass_stride, last_cuts_ptr, last_sums_ptr, cuts_ptr, sums_ptr, n,
    CROSSING: tl.constexpr, PASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    h = tl.program_id(1)
    head = (tl.program_id(2) * tl.num_programs(1) + h).to(tl.int64)
    known, missing = _cut(last_cuts_ptr, last_sums_ptr, total_ptr, mass_ptr, mass_stride, head, h, CROSSING)
    one = tl.zeros([1, 1], tl.int32)
    tl.store(cuts_ptr + head * 2 + one, known, mask=one + tl.program_id(0) == 0)
    tl.store(cuts_ptr + head * 2 + 1 + one, missing, mask=one + tl.program_id(0) == 0)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]  # a head may have over 2^31 blocks
    ticks = tl.load(ticks_ptr + head * n + place, mask=place < n, other=0.0)
    bits = _key(ticks) >> ((2 - PASS) * _BITS)
    at = sums_ptr + head * _OF_HEAD + (bits & (_SUMS - 1))
    tl.atomic_add(at, ticks.to(tl.int32).to(tl.int64), mask=(ticks > 0.0) & (bits >> _BITS == known))


@remembered
@triton.jit(do_not_specialize=["rows"])
def _keep(
    number_ptr, bound_ptr, bound_stride, ticks_ptr, total_ptr, mass_ptr, mass_stride, cuts_ptr, sums_ptr, keep_ptr, forced_ptr, forced_strides,
    positions, position_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CROSSING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keeps the blocks that are taken, and what is kept in any case, as far as it is in reach."""
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    h, b = tl.program_id(1), tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    one = tl.zeros([1, 1], tl.int32)
    lightest, missing = _cut(cuts_ptr, sums_ptr, total_ptr, mass_ptr, mass_stride, head, h, CROSSING)
    n = rows.to(tl.int64) * cols
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]  # a head may have over 2^31 blocks
    inside = place < n
    ticks = tl.load(ticks_ptr + head * n + place, mask=inside, other=0.0)
    key = _key(ticks)
    # Of the blocks that weigh as much as the lightest, the first are taken: all, but where weights are the same.
    unit = tl.maximum(lightest + (_ONE - 1), _ONE).to(tl.int32).to(tl.float32, bitcast=True).to(tl.int64)
    last = (lightest & (_SUMS - 1)).to(tl.int32)
    ties = tl.load(sums_ptr + head * _OF_HEAD + last) // unit
    spared = 1 if CROSSING else 0
    tied = (key == lightest) & (key > 0)
    before = tl.zeros([1, 1], tl.int64)
    if any_of((ties - spared) * unit >= missing):
        for program in range(tl.program_id(0)):
            earlier = (one.to(tl.int64) + program) * TILE + tl.arange(0, TILE)[None, :]
            same = _key(tl.load(ticks_ptr + head * n + earlier)) == lightest
            before += tl.sum(same.to(tl.int64), 1, keep_dims=True)
    rank = before + tl.cumsum(tied.to(tl.int32), 1) - spared
    keep = (key > lightest) | (tied & (rank * unit < missing))

    row, col = (place // cols).to(tl.int32), (place % cols).to(tl.int32)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, inside, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    keep = keep | diagonal_blocks(visible, q_first, k_last, CAUSAL)
    keep = keep | (tl.load(mass_ptr + h * mass_stride + one).to(tl.float32) >= 1.0)
    if forced_ptr is not None:
        keep = keep | (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0)
    tl.store(keep_ptr + head * n + place, keep & visible, mask=inside)

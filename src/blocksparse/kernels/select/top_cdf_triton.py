"""The Triton kernels of `select/top_cdf.py`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import head_strides
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept, BlockGrid
from blocksparse.kernels.masks.grid_triton import (
    any_of,
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    rows_at,
    strides,
    tile,
    visible_blocks,
)
from blocksparse.kernels.masks.visibility_triton import numbers_of_always_kept, with_always_kept
from blocksparse.kernels.select.top_k_triton import cut, first_of, width_of_rows
from blocksparse.launch.launches import remembered

# Blocks per thread, and the least width of a row: the computation for each block is large compared with a search step.
_PER_THREAD, _LEAST = 8, 128

# These stand in the place of a block's ticks, so that few registers are live while a row is searched.
_FORCED = tl.constexpr(-1.0)
_UNREACHABLE = tl.constexpr(-2.0)
_MOST_TICKS = tl.constexpr(0x4E800000)  # the bits of 2^30 in fp32


def top_cdf_triton(
    values: Tensor,
    forced: Tensor | None,
    mass: float | Tensor,
    grid: BlockGrid,
    *,
    crossing: bool,
    always: AlwaysKept = NO_BLOCKS,
) -> Tensor:
    """Launch the kernel; arguments as in `top_cdf`."""
    width = width_of_rows(values.shape[3], _PER_THREAD, _LEAST)
    return _launch(_top_cdf_kernel, values, forced, mass, grid, always, width, CROSSING=crossing)


def _launch(
    kernel: Any,
    values: Tensor,
    forced: Tensor | None,
    number: float | Tensor,
    grid: BlockGrid,
    always: AlwaysKept,
    width: tuple[int, int],
    **constants: bool,
) -> Tensor:
    """Launch a kernel that takes blocks of a row by a number, or by one for each head."""
    B, H, rows, cols = values.shape
    keep = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    of_head = number if isinstance(number, Tensor) else None
    kernel[(rows, H, B)](
        values, forced, of_head, keep, *positions(grid),
        strides(values), None if forced is None else strides(forced),
        None if of_head is None else head_strides(of_head)[1], strides(keep),
        rows, cols, float(number) if of_head is None else None,
        *numbers_of_always_kept(grid, always),
        CAUSAL=grid.causal, WINDOW=grid.window, **constants, ROWS=1, COLS=width[0], num_warps=width[1],
    )  # fmt: skip
    return keep


@triton.jit
def _exponent(x):
    """The least `e` with `x < 2^e`, for positive fp32: its exponent field less 126, small numbers times 2^64 first."""
    small = x < 7.8886090522101181e-31  # 2^-100
    bits = (x * tl.where(small, 18446744073709551616.0, 1.0)).to(tl.int32, bitcast=True)  # 2^64
    return ((bits >> 23) & 0xFF) - 126 - tl.where(small, 64, 0)


@triton.jit
def _power_of_two(n):
    """`2^n` in fp32, for an `n` at which that is a normal number."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(values):
    """Values of a launch tile as finite numbers that are not negative; NaN counts as 0."""
    return tl.where(values > 0.0, tl.minimum(values, 3.4028234663852886e38), 0.0)


@triton.jit
def ticks_of(weights, heaviest):
    """Weights of a launch tile as ticks (`top_cdf.py`): integers in fp32, which holds them all; below 2^30."""
    shift = 30 - _exponent(heaviest)  # up to 220, and so in two factors, for fp32 does not hold 2^220
    first = tl.minimum(shift, 100)
    ticks = weights * _power_of_two(first) * _power_of_two(shift - first)
    # From 2^23 (8388608) on fp32 has integers only: adding that rounds to them, ties to even, and greater numbers are
    # integers already. Products with powers of two are exact.
    return tl.where(ticks < 8388608.0, ticks + 8388608.0 - 8388608.0, ticks)


@triton.jit
def limit_of(total, mass, CROSSING: tl.constexpr):
    """The least sum whose share of `total`, rounded to fp32, is not below `mass`; or without `CROSSING`, is above `mass`.

    So a block is taken if the sum before it is below this, or without `CROSSING` if the sum with it is.
    """
    bits = mass.to(tl.int32, bitcast=True)
    beside = (bits - 1 if CROSSING else bits + 1).to(tl.float32, bitcast=True)
    # A share is rounded to `mass` or to its neighbour by the side of their midpoint on which it lies. The product of the
    # midpoint and the total, which is below 2^45, is off by less than 1 in fp64. So the answer is near it: of three sums in
    # a row, those whose share does not suffice are counted, and the answer comes after them.
    whole = tl.maximum(total, 1).to(tl.float64)
    limit = ((mass.to(tl.float64) + beside.to(tl.float64)) * 0.5 * whole).to(tl.int64) - 1
    below = tl.zeros_like(limit)
    for i in tl.static_range(3):
        share = ((limit + i).to(tl.float64) / whole).to(tl.float32)
        if CROSSING:
            below += (share < mass).to(tl.int64)
        else:
            below += (share <= mass).to(tl.int64)
    return tl.where(total > 0, limit + below, 0)


@triton.jit
def sum_of(ticks):
    """The sum of each row of ticks, `[ROWS, 1]` int64."""
    return tl.sum(ticks.to(tl.int32).to(tl.int64), 1, keep_dims=True)


@triton.jit
def exact_cut(ticks, target):
    """The least whole number, as fp32, such that the blocks of a row with more ticks sum to less than `target`."""
    low = tl.zeros_like(target)
    high = low + (1 << 30)
    for _ in range(30):
        middle = (low + high) >> 1
        less = sum_of(tl.where(ticks.to(tl.int32) > middle, ticks, 0.0)) < target
        high = tl.where(less, middle, high)
        low = tl.where(less, low, middle)
    return high.to(tl.float32)


@triton.jit
def heaviest_of(ticks, left, target, COLS: tl.constexpr, CROSSING: tl.constexpr):
    """Which entries of each row are taken, heaviest first, until they reach `target`; `left` is the sum of all positive ones."""
    # Where the search begins: `COLS` entries that weigh `spare` or less weigh no more together than may be missing
    # (`left - target`), so the lightest one taken weighs more, or the same. `low` is 16 fp32 numbers below it.
    spare = (tl.maximum(left - target, 0).to(tl.float32) / COLS).to(tl.int32, bitcast=True)
    low = tl.maximum(tl.minimum(spare, _MOST_TICKS) - 16, 0)
    high = tl.where(target > 0, _MOST_TICKS, low + 1)
    key = ticks.to(tl.int32, bitcast=True)
    lightest = cut(key, ticks, low, high, left.to(tl.float32), target.to(tl.float32), True)
    lightest = lightest.to(tl.float32, bitcast=True)
    above = sum_of(tl.where(ticks > lightest, ticks, 0.0))
    number = tl.sum((ticks == lightest).to(tl.int64), 1, keep_dims=True)
    unit = lightest.to(tl.int32).to(tl.int64)
    missing = target - above
    # Sums in fp32 may be off, which matters if they come very near to the target: then search again with integers.
    if any_of((target > 0) & (left >= target) & ((missing <= 0) | (number * unit < missing))):
        lightest = exact_cut(ticks, target)
        above = sum_of(tl.where(ticks > lightest, ticks, 0.0))
        number = tl.sum((ticks == lightest).to(tl.int64), 1, keep_dims=True)
        unit = lightest.to(tl.int32).to(tl.int64)
        missing = target - above
    tied = first_of(ticks == lightest, number, unit, missing, CROSSING)
    return (ticks > 0.0) & (target > 0) & ((ticks > lightest) | tied)


@remembered
@triton.jit(do_not_specialize=["rows", "near", "first", "eta", "state", "first_row", "from_query"])
def _top_cdf_kernel(
    values_ptr, forced_ptr, mass_ptr, keep_ptr, positions, position_strides,
    values_strides, forced_strides, mass_stride, keep_strides,
    rows, cols, mass, near, first, eta, state, first_row, from_query,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CROSSING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    weights = weights_of(load_blocks(values_ptr, values_strides, b, h, row, col, visible, 0.0))
    ticks = ticks_of(weights, tl.max(weights, 1, keep_dims=True))
    total = sum_of(ticks)
    left = total
    if forced_ptr is not None:
        forced = (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0) & visible
        left = sum_of(tl.where(forced, 0.0, ticks))
        ticks = tl.where(forced, _FORCED, ticks)
    ticks = tl.where(visible, ticks, _UNREACHABLE)
    if mass_ptr is None:
        share = tl.zeros([ROWS, 1], tl.float32) + mass
    else:
        share = tl.load(mass_ptr + h * mass_stride + tl.zeros_like(row)).to(tl.float32)  # [ROWS, 1]
    target = limit_of(total, share, CROSSING) - (total - left)

    taken = heaviest_of(ticks, left, target, COLS, CROSSING)
    if not CROSSING:
        best = tl.max(ticks, 1, keep_dims=True)
        leftmost = tl.min(tl.where(ticks == best, col, COLS), 1, keep_dims=True)
        taken = taken | ((ticks > 0.0) & (col == leftmost))
    # Positions of keys are loaded again, so that they are not kept in registers during the search.
    k_last_at = rows_at(positions[3], position_strides[3], b, h, row) + col * position_strides[3][3]
    k_last = tl.load(k_last_at, mask=inside, other=-1, volatile=True)
    k_first = k_last
    if near is not None or first is not None:
        k_first_at = rows_at(positions[2], position_strides[2], b, h, row) + col * position_strides[2][3]
        k_first = tl.load(k_first_at, mask=inside, other=0, volatile=True)
    visible = ticks > _UNREACHABLE
    always = diagonal_blocks(visible, q_first, k_last, CAUSAL) | (ticks == _FORCED)
    placed = with_always_kept(
        share >= 1.0, q_first, q_last, k_first, k_last, row, col, near, first, eta, state, first_row, from_query, CAUSAL
    )  # fmt: skip
    keep = taken | always | (placed & visible)
    tl.store(rows_at(keep_ptr, keep_strides, b, h, row) + col, keep, mask=inside)


def row_share_triton(
    values: Tensor,
    forced: Tensor | None,
    alpha: float | Tensor,
    grid: BlockGrid,
    *,
    of: Literal["peak", "row"],
    always: AlwaysKept = NO_BLOCKS,
) -> Tensor:
    """Launch the kernel; arguments as in `row_share`."""
    width = width_of_rows(values.shape[3])
    return _launch(_row_share_kernel, values, forced, alpha, grid, always, width, OF_ROW=of == "row")


@remembered
@triton.jit(do_not_specialize=["rows", "near", "first", "eta", "state", "first_row", "from_query"])
def _row_share_kernel(
    values_ptr, forced_ptr, alpha_ptr, keep_ptr, positions, position_strides,
    values_strides, forced_strides, alpha_stride, keep_strides,
    rows, cols, alpha, near, first, eta, state, first_row, from_query,
    OF_ROW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    values = load_blocks(values_ptr, values_strides, b, h, row, col, visible, 0.0)
    if alpha_ptr is None:
        alpha = tl.zeros([ROWS, 1], tl.float32) + alpha
    else:
        alpha = tl.load(alpha_ptr + h * alpha_stride + tl.zeros_like(row)).to(tl.float32)
    if OF_ROW:
        weights = weights_of(values)
        ticks = ticks_of(weights, tl.max(weights, 1, keep_dims=True))
        # Roots and products of fp64 are rounded alike on every device.
        root = tl.sqrt(tl.sum(visible.to(tl.int32), 1, keep_dims=True).to(tl.float64))
        keep = ticks.to(tl.float64) * root >= alpha.to(tl.float64) * sum_of(ticks).to(tl.float64)
        keep = keep & (ticks > 0.0)
    else:
        best = tl.max(tl.where(values != values, float("inf"), values), 1, keep_dims=True)  # NaN is the greatest
        keep = (values >= alpha * best) & (values > 0.0)
    if forced_ptr is not None:
        keep = keep | (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0)
    keep = with_always_kept(
        keep, q_first, q_last, k_first, k_last, row, col, near, first, eta, state, first_row, from_query, CAUSAL
    )  # fmt: skip
    keep = (keep & visible) | diagonal_blocks(visible, q_first, k_last, CAUSAL)
    tl.store(rows_at(keep_ptr, keep_strides, b, h, row) + col, keep, mask=inside)

"""The Triton kernels of `select/top_k.py`, and the search of a row that other selections share.

`visiting_order` counts instead of sorting. The place of a block is the number of blocks before it, those of a smaller rank
and those of the same rank in a smaller column. This takes `cols^2` comparisons a row, and no exchange between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import head_strides
from blocksparse.kernels.common.sizes import HeadMask, cdiv, power_of_2
from blocksparse.kernels.masks.grid import BlockGrid
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
from blocksparse.launch.launches import remembered

_PER_THREAD = 32  # keys per thread: that makes few warps for a row, since they wait for one another
_LEAST = 256  # keys of a launch tile: all short rows get the same
_STEPS = tl.constexpr(8)  # guesses before the bounds are drawn up to the keys that are left
_NO_KEY = tl.constexpr(-(2**31))  # below every key: where a row has none
_LARGEST = tl.constexpr(2**31 - 1)


def width_of_rows(cols: int, per_thread: int = _PER_THREAD, least: int = _LEAST) -> tuple[int, int]:
    """Columns of a launch tile that holds a row on chip, `least` or more, and its warps."""
    wide = max(power_of_2(cols), least)
    return wide, max(1, min(16, wide // (32 * per_thread)))


@triton.jit
def _guess(low, high, above_low, above_high, target, bisect):
    """A number between `low` and `high`, if there is one: half way if `bisect`, else interpolated between the sums above."""
    span = above_low - above_high
    part = tl.where(span > 0.0, (above_low - target) / tl.where(span > 0.0, span, 1.0), 0.5)
    part = tl.minimum(tl.maximum(0.65 * part + 0.175, 0.02), 0.98)  # to the middle, so that both bounds move
    part = tl.where(bisect, 0.5, part)
    # The difference of low and high may not fit an int32; it fits a uint32, and the addition wraps around.
    middle = low + (part * (high.to(tl.float32) - low.to(tl.float32))).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.maximum(low, tl.minimum(high - 1, tl.maximum(middle, low + 1)))


@triton.jit
def cut(key, weight, low, high, above_low, target, BY_KEY: tl.constexpr):
    """The key of each row at which the sum of weights, greatest key first, reaches `target`.

    The keys above it weigh less than `target` together; with those that equal it they weigh `target` or more. This is exact
    as far as sums in fp32 are.

    Args:
        key: int32 `[ROWS, COLS]`.
        weight: fp32 `[ROWS, COLS]`: all 1; or, with `BY_KEY`, numbers that are not negative and whose bits are the key.
        low, high: int32 `[ROWS, 1]`. The key that is sought is above `low`, and no key is above `high`.
        above_low: fp32 `[ROWS, 1]`. The weight of the keys above `low`, or more.
        target: fp32 `[ROWS, 1]`.
    """
    above_high = tl.zeros_like(target)
    rounds = 0
    searching = any_of(high > low + 1)
    while searching:
        step = 0
        while searching & (step < _STEPS):
            middle = _guess(low, high, above_low, above_high, target, rounds > 0)
            above = tl.sum(tl.where(key > middle, weight, 0.0), 1, keep_dims=True)
            less = (above < target) & (middle > low)
            above_high = tl.where(less, above, above_high)
            above_low = tl.where(less, above_low, above)
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
            if BY_KEY:
                lightest = low.to(tl.float32, bitcast=True)
            else:
                lightest = tl.full(target.shape, 1.0, tl.float32)
            # If two keys were left between the bounds, they would weigh at least twice what the lightest may weigh.
            searching = any_of((high > low + 1) & (above_low - above_high >= 1.75 * lightest))
            step += 1
        if searching:  # keys are equal, or crowd together: draw both bounds up to the keys that are left
            left = (key > low) & (key <= high)
            low = tl.maximum(low, tl.min(tl.where(left, key, _LARGEST), 1, keep_dims=True) - 1)
            high = tl.maximum(tl.max(tl.where(left, key, _NO_KEY), 1, keep_dims=True), low + 1)
            searching = any_of(high > low + 1)
        rounds += 1
    return tl.max(tl.where(key <= high, key, _NO_KEY), 1, keep_dims=True)


@triton.jit
def first_of(chosen, number, unit, missing, BEFORE: tl.constexpr):
    """The first columns of `chosen` `[ROWS, COLS]`, as long as they weigh less than `missing`, if each weighs `unit`.

    Args:
        number: how many are chosen, `[ROWS, 1]`.
        BEFORE: compare the weight of the chosen columns before a column. Else that column's is included.
    """
    itself: tl.constexpr = 1 if BEFORE else 0
    if any_of((number - itself) * unit >= missing):  # seldom, for keys would have to be equal
        chosen = chosen & ((tl.cumsum(chosen.to(tl.int32), 1) - itself) * unit < missing)
    return chosen


def top_k_triton(
    values: Tensor,
    forced: Tensor | None,
    k: int | Tensor | None,
    share: Tensor | None,
    grid: BlockGrid,
    *,
    forced_first: bool,
    of_all_keys: bool,
) -> Tensor:
    """Launch the kernel; arguments as in `top_k`."""
    B, H, rows, cols = values.shape
    keep = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    wide, num_warps = width_of_rows(cols)
    _top_k_kernel[(rows, H, B)](
        values, forced, share, keep, *positions(grid),
        strides(values), None if forced is None else strides(forced),
        None if share is None else head_strides(share)[1], strides(keep),
        rows, cols, k,
        CAUSAL=grid.causal, WINDOW=grid.window, FORCED_FIRST=forced_first, OF_ALL_KEYS=of_all_keys, ROWS=1, COLS=wide,
        num_warps=num_warps,
    )  # fmt: skip
    return keep


@triton.jit
def sortable(x):
    """int32 in the same order as the fp32 numbers `x`, none of them NaN; both zeros become 0.

    The bits of negative numbers stand in falling order, so all but their sign are flipped.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _top_k_kernel(
    values_ptr, forced_ptr, share_ptr, keep_ptr, positions, position_strides,
    values_strides, forced_strides, share_stride, keep_strides,
    rows, cols, k,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FORCED_FIRST: tl.constexpr, OF_ALL_KEYS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    always = diagonal_blocks(visible, q_first, k_last, CAUSAL)
    values = load_blocks(values_ptr, values_strides, b, h, row, col, visible, float("-inf"))
    values = tl.where(
        values != values,
        float("-inf"),
        tl.minimum(tl.maximum(values, -3.4028234663852886e38), 3.4028234663852886e38),
    )
    if forced_ptr is not None:
        forced = (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0) & visible
        always = always | forced
        if not FORCED_FIRST:
            values = tl.where(forced, float("-inf"), values)
    if FORCED_FIRST:
        values = tl.where(always, float("inf"), values)
    key = tl.where(visible, sortable(values), _NO_KEY)
    there = tl.sum(visible.to(tl.int32), 1, keep_dims=True)

    if share_ptr is None:
        count = tl.zeros([ROWS, 1], tl.int32) + k
    else:
        share = tl.load(share_ptr + h * share_stride)
        if OF_ALL_KEYS:
            count = tl.zeros([ROWS, 1], tl.int32) + tl.maximum((share * cols).to(tl.float32).to(tl.int32), 1)
        else:
            count = tl.ceil((share * there.to(tl.float64)).to(tl.float32)).to(tl.int32)
    count = tl.minimum(count, there).to(tl.float32)
    high = tl.maximum(tl.max(key, 1, keep_dims=True), _NO_KEY + 1)
    low = tl.where(count > 0.0, _NO_KEY, high - 1)
    weight = tl.full([ROWS, COLS], 1.0, tl.float32)
    worst = cut(key, weight, low, high, tl.zeros_like(count) + cols, count, False)
    missing = count - tl.sum((key > worst).to(tl.float32), 1, keep_dims=True)
    tied = key == worst
    number = tl.sum(tied.to(tl.float32), 1, keep_dims=True)
    taken = (key > worst) | first_of(tied, number, 1.0, missing, True)
    tl.store(rows_at(keep_ptr, keep_strides, b, h, row) + col, (taken | always) & visible, mask=inside)


_CHUNK = 16  # columns that all others are compared with at a time
_DROPPED = tl.constexpr(2**31 - 1)  # stands for the rank of a block that is not kept
_GREATEST = tl.constexpr(2**31 - 2)  # the greatest rank of one that is


def visiting_order_triton(keep: Tensor, rank: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as in `visiting_order`."""
    B, H, rows, cols = keep.shape
    index = torch.empty(keep.shape, dtype=torch.int32, device=keep.device)
    opened, count = (torch.empty((B, H, rows), dtype=torch.int32, device=keep.device) for _ in range(2))
    wide = max(power_of_2(cols), 2 * _CHUNK)
    _visiting_order_kernel[(rows, H, B)](
        keep, rank, tau.contiguous(), index, opened, count, strides(keep), strides(rank), cols,
        COLS=wide, CHUNK=_CHUNK, num_warps=4 if wide > 128 else 1,
    )  # fmt: skip
    return index, opened, count


@triton.jit
def _ranks(keep_at, rank_at, keep_stride, rank_stride, col, cols):
    """Ranks of the columns `col`, that of dropped blocks where nothing is kept, and which are kept."""
    inside = col < cols
    keep = tl.load(keep_at + col * keep_stride, mask=inside, other=0) != 0
    rank = tl.load(rank_at + col * rank_stride, mask=inside, other=0)
    return tl.where(keep, tl.minimum(rank, _GREATEST), _DROPPED), keep


@remembered
@triton.jit(do_not_specialize=["cols"])
def _visiting_order_kernel(
    keep_ptr, rank_ptr, tau_ptr, index_ptr, opened_ptr, count_ptr, keep_strides, rank_strides, cols,
    COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keep_at = rows_at(keep_ptr, keep_strides, b, h, row)
    rank_at = rows_at(rank_ptr, rank_strides, b, h, row)
    col = tl.arange(0, COLS)[:, None]
    mine, keep = _ranks(keep_at, rank_at, keep_strides[3], rank_strides[3], col, cols)
    place = tl.zeros([COLS, 1], tl.int32)
    for start in range(0, cols, CHUNK):
        other = start + tl.arange(0, CHUNK)[None, :]
        its, _ = _ranks(keep_at, rank_at, keep_strides[3], rank_strides[3], other, cols)
        before = (other < cols) & ((its < mine) | ((its == mine) & (other < col)))
        place += tl.sum(before.to(tl.int32), 1, keep_dims=True)
    list_at = (b * tl.num_programs(1) + h).to(tl.int64) * tl.num_programs(0) + row
    tl.store(index_ptr + list_at * cols + place, col, mask=col < cols)
    opened = keep & (mine <= tl.where(tl.load(tau_ptr + h) == 0.0, _DROPPED, -1))  # no rank is above `_DROPPED`
    tl.store(opened_ptr + list_at, tl.sum(tl.sum(opened.to(tl.int32), 1), 0))
    tl.store(count_ptr + list_at, tl.sum(tl.sum(keep.to(tl.int32), 1), 0))


_TILE = 4096  # blocks per program


def routed_triton(heads: HeadMask, below: Tensor, otherwise: Tensor) -> Tensor:
    """Launch the kernel; arguments as in `routed`."""
    (number, bound, others), (B, H, rows, cols) = heads, below.shape
    if others:
        below, otherwise = otherwise, below
    out = torch.empty(below.shape, dtype=torch.bool, device=below.device)
    _routed_kernel[(cdiv(rows * cols, _TILE), H, B)](
        number.contiguous(), bound, below.contiguous(), otherwise.contiguous(), out, head_strides(bound)[1],
        rows * cols,
        TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return out


def either_triton(mine: Tensor, its: Tensor) -> Tensor:
    """Entries that are true in either of two masks of one shape, bool, each without gaps in memory."""
    out = torch.empty(mine.shape, dtype=torch.bool, device=mine.device)
    n = mine.numel()
    _either[(cdiv(n, _TILE),)](mine, its, out, n, TILE=_TILE, num_warps=4)
    return out


@remembered
@triton.jit(do_not_specialize=["bound_stride"])
def _routed_kernel(number_ptr, bound_ptr, below_ptr, otherwise_ptr, out_ptr, bound_stride, n, TILE: tl.constexpr):
    h = tl.program_id(1)
    head = (tl.program_id(2) * tl.num_programs(1) + h).to(tl.int64)
    one = tl.zeros([TILE], tl.int32)
    is_below = tl.load(number_ptr + head + one).to(tl.float64) < tl.load(bound_ptr + h * bound_stride + one)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    first = tl.load(below_ptr + head * n + at, mask=there & is_below, other=0)
    second = tl.load(otherwise_ptr + head * n + at, mask=there & ~is_below, other=0)
    tl.store(out_ptr + head * n + at, (first != 0) | (second != 0), mask=there)


@remembered
@triton.jit
def _either(mine_ptr, its_ptr, out_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    mine = tl.load(mine_ptr + at, mask=there, other=0) != 0
    its = tl.load(its_ptr + at, mask=there, other=0) != 0
    tl.store(out_ptr + at, mine | its, mask=there)

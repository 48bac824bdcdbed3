"""The Triton kernels of `select/vertical_slash.py`.

To find the heaviest lines, a program holds the lines of one head, and searches instead of sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import asked, head_strides, not_asked
from blocksparse.kernels.common.sizes import FAR, Heads, cdiv
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.masks.grid_triton import (
    any_of,
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    strides,
    tile_of_grid,
    visible_blocks,
)
from blocksparse.kernels.select.top_cdf_triton import heaviest_of, limit_of, sum_of, ticks_of, weights_of
from blocksparse.kernels.select.top_k_triton import cut, first_of, sortable, width_of_rows
from blocksparse.kernels.select.vertical_slash import ChosenRuns
from blocksparse.launch.launches import remembered

# Of a launch tile, no wider than it must be: causality leaves nearly half of such tiles without a block that is seen.
_TILE = {"ROWS": 16, "COLS": 64}


def vertical_slash_blocks_triton(
    columns: ChosenRuns,
    bands: ChosenRuns,
    grid: BlockGrid,
    *,
    whole: Tensor | None = None,
    first: int | None = None,
    also: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """Launch the kernel; arguments as in `vertical_slash_blocks`."""
    (B, H, keys), distances = columns.counts.shape, bands.counts.shape[2]
    rows, cols = grid.q_first.shape[2], grid.k_first.shape[3]
    keep = torch.empty((B, H, rows, cols), dtype=torch.bool, device=columns.counts.device)
    _vertical_slash_blocks_kernel[(cdiv(rows, _TILE["ROWS"]) * cdiv(cols, _TILE["COLS"]), H, B)](
        *asked(heads), columns.counts.contiguous(), bands.counts.contiguous(), whole, also, keep,
        None if whole is None else head_strides(whole)[1], None if also is None else strides(also), *positions(grid),
        keys - 1, distances - 1, rows, cols, first,
        OTHERS=heads is not None and heads.others, KEY_RUN=columns.run, RUN=bands.run,
        CAUSAL=grid.causal, WINDOW=grid.window, **_TILE,
        num_warps=4,
    )  # fmt: skip
    return keep


@remembered
@triton.jit(do_not_specialize=["whole_stride", "keys", "distances", "rows", "cols", "first"])
def _vertical_slash_blocks_kernel(
    number_ptr, bound_ptr, bound_stride, keys_ptr, distances_ptr, whole_ptr, also_ptr, keep_ptr, whole_stride, also_strides, positions, position_strides,
    keys, distances, rows, cols, first,
    OTHERS: tl.constexpr, KEY_RUN: tl.constexpr, RUN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride, OTHERS):
            return
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    visible = inside & visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    keep_at = keep_ptr + (head * rows + row) * cols + col
    if any_of(visible) == 0:
        tl.store(keep_at, tl.zeros([ROWS, COLS], tl.int1), mask=inside)
        return
    near, far = q_first - k_last, q_last - k_first
    if not CAUSAL:
        near, far = tl.maximum(near, -far), tl.maximum(far, -near)
    at = distances_ptr + head * (distances + 1)
    before = tl.load(at + tl.minimum(tl.maximum(near, 0) // RUN, distances), mask=visible, other=0)
    end = tl.where(far < 0, 0, tl.maximum(far, 0) // RUN + 1)
    keep = before < tl.load(at + tl.minimum(end, distances), mask=visible, other=0)
    at = keys_ptr + head * (keys + 1)
    before = tl.load(at + tl.minimum(col * KEY_RUN, keys), mask=col < cols, other=0)
    keep = keep | (before < tl.load(at + tl.minimum((col + 1) * KEY_RUN, keys), mask=col < cols, other=0))
    if whole_ptr is not None:
        keep = keep | (tl.load(whole_ptr + h * whole_stride + tl.zeros_like(row)).to(tl.float32) >= 1.0)
    if first is not None:
        keep = keep | (k_first < first)
    if also_ptr is not None:
        keep = keep | (load_blocks(also_ptr, also_strides, b, h, row, col, inside, 0) != 0)
    keep = (keep & visible) | diagonal_blocks(visible, q_first, k_last, CAUSAL)
    tl.store(keep_at, keep, mask=inside)


_NO_LINE = tl.constexpr(-(2**31))
_MOST_TICKS = tl.constexpr(0x4E800000)  # the bits of 2^30 in fp32


def fewest_triton(
    columns: Tensor, bands: Tensor, mass: Tensor, least: int, most: int | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as in `fewest`."""
    columns, bands = columns.contiguous(), bands.contiguous()
    (B, H, n), longest = columns.shape, max(columns.shape[2], bands.shape[2])
    counts = _empty(columns, True), _empty(bands, True)
    wide, num_warps = width_of_rows(longest)
    _fewest[(H, B, 2)](
        columns, bands, *counts, mass, head_strides(mass)[1], n, bands.shape[2],
        min(least, longest), longest if most is None else min(most, longest),
        COLS=wide, num_warps=num_warps,
    )  # fmt: skip
    return counts


def heaviest_triton(weight: Tensor, count: Tensor, first: int, spared: tuple[Tensor, int] | None = None) -> Tensor:
    """Launch the kernel; arguments as in `heaviest`."""
    weight = weight.contiguous()
    taken = _empty(weight, False)
    _launch(weight, count, first, spared, taken, None)
    return taken


def heaviest_of_both_triton(
    columns: Tensor,
    bands: Tensor,
    counts: tuple[Tensor, Tensor],
    firsts: tuple[int, int],
    spared: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel once for both; arguments as in `heaviest_of_both`."""
    columns, bands = columns.contiguous(), bands.contiguous()
    taken = _empty(columns, True), _empty(bands, True)
    _launch(columns, counts[0], firsts[0], spared, taken[0], (bands, counts[1], firsts[1], taken[1]))
    return taken


def _launch(
    weight: Tensor,
    count: Tensor,
    first: int,
    spared: tuple[Tensor, int] | None,
    taken: Tensor,
    other: tuple[Tensor, Tensor, int, Tensor] | None,
) -> None:
    """Search the lines of one kind; or of two, counted: the others, how many, how many of the first, where they go."""
    (B, H, n), (last, most) = weight.shape, spared or (count, 0)  # 0 of them: the same kernel, compiled once
    others, of_others, first_others, taken_others = other or (weight, count, first, taken)
    m = others.shape[2]
    wide, num_warps = width_of_rows(max(n, m))
    _heaviest[(H, B, 1 if other is None else 2)](
        weight, others, count, of_others, last, taken, taken_others,
        head_strides(count)[1], head_strides(of_others)[1], head_strides(last)[1],
        n, m, min(first, n), min(first_others, m), min(most, FAR),
        COUNTED=other is not None, COLS=wide, num_warps=num_warps,
    )  # fmt: skip


def _empty(lines: Tensor, counted: bool) -> Tensor:
    """Where the result goes: which of `lines` `[B, H, n]` are taken, or the running count."""
    shape, dtype = (
        (lines.shape, torch.bool) if not counted else ((*lines.shape[:2], lines.shape[2] + 1), torch.int32)
    )
    return torch.empty(shape, dtype=dtype, device=lines.device)


@triton.jit
def _store(taken_ptr, head, line, taken, n, COUNTED: tl.constexpr):
    """Store which lines `[1, COLS]` of a head are taken, or how many before each and in all."""
    if COUNTED:
        at = taken_ptr + head * (n + 1)
        tl.store(at + line + 1, tl.cumsum(taken.to(tl.int32), 1), mask=line < n)
        tl.store(at + line, tl.zeros_like(line), mask=line == 0)
    else:
        tl.store(taken_ptr + head * n + line, taken, mask=line < n)


@triton.jit
def _best(key, low, high, number, n, COLS: tl.constexpr):
    """Which lines are the first `number` `[1, 1]` fp32 by falling `key` in `(low, high]`, ties by place."""
    low = tl.where(number > 0.0, low, high - 1)
    weight = tl.full([1, COLS], 1.0, tl.float32)
    worst = cut(key, weight, low, high, tl.zeros_like(number) + n, number, False)
    missing = number - tl.sum((key > worst).to(tl.float32), 1, keep_dims=True)
    tied = key == worst
    ties = tl.sum(tied.to(tl.float32), 1, keep_dims=True)
    return (key > worst) | first_of(tied, ties, 1.0, missing, True)


@remembered
@triton.jit(do_not_specialize=["n", "bands", "least", "most"])
def _fewest(
    lines_ptr, bands_ptr, taken_ptr, bands_taken_ptr, mass_ptr, mass_stride, n, bands, least, most, COLS: tl.constexpr
):  # fmt: skip
    h = tl.program_id(0)
    if tl.program_id(2) == 1:
        lines_ptr = bands_ptr
        taken_ptr = bands_taken_ptr
        n = bands
    line = tl.arange(0, COLS)[None, :]
    head = (tl.program_id(1) * tl.num_programs(0) + h).to(tl.int64)
    weights = weights_of(tl.load(lines_ptr + head * n + line, mask=line < n, other=0.0))
    ticks = ticks_of(weights, tl.max(weights, 1, keep_dims=True))
    total = sum_of(ticks)
    ticks = tl.where(line < n, ticks, -1.0)
    mass = tl.load(mass_ptr + h * mass_stride + tl.zeros([1, 1], tl.int32)).to(tl.float32)
    # A mass of 0 has no smaller neighbour, from which `limit_of` starts.
    target = tl.where(mass > 0.0, limit_of(total, tl.maximum(mass, 1.1754943508222875e-38), True), 0)
    taken = heaviest_of(ticks, total, target, COLS, True)
    number = tl.sum(taken.to(tl.int32), 1, keep_dims=True)
    wanted = tl.minimum(tl.maximum(number, tl.minimum(least, n)), most)
    if any_of(wanted != number):
        low = tl.zeros_like(number) - 1  # the bits of no tick, and of -1.0, which lies outside, are far below
        key = ticks.to(tl.int32, bitcast=True)
        taken = _best(key, low, low + _MOST_TICKS + 1, wanted.to(tl.float32), n, COLS)
    _store(taken_ptr, head, line, taken, n, True)


@remembered
@triton.jit(
    do_not_specialize=[
        "n", "others", "first", "first_others", "most", "count_stride", "count_others_stride", "last_stride",
    ]
)  # fmt: skip
def _heaviest(
    weight_ptr, others_ptr, count_ptr, count_others_ptr, last_ptr, taken_ptr, taken_others_ptr,
    count_stride, count_others_stride, last_stride, n, others, first, first_others, most,
    COUNTED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the heaviest lines of a head; programs of the second kind take the other lines, of which none are spared."""
    h = tl.program_id(0)
    if tl.program_id(2) == 1:
        weight_ptr = others_ptr
        count_ptr = count_others_ptr
        taken_ptr = taken_others_ptr
        count_stride = count_others_stride
        n = others
        first = first_others
        most = most * 0
    line = tl.arange(0, COLS)[None, :]
    head = (tl.program_id(1) * tl.num_programs(0) + h).to(tl.int64)
    weight = tl.load(weight_ptr + head * n + line, mask=line < n, other=0.0)
    weight = tl.where(weight != weight, 0.0, weight)
    weight = tl.minimum(tl.maximum(weight, -3.4028234663852886e38), 3.4028234663852886e38)
    last = tl.minimum(tl.load(last_ptr + h * last_stride + tl.zeros([1, 1], tl.int32)), most.to(tl.float64))
    spared = (line.to(tl.float64) >= n.to(tl.float64) - last) & (line >= first)
    weight = tl.where(spared, -1.0, weight)
    weight = tl.where(line < first, float("inf"), weight)
    key = tl.where(line < n, sortable(weight), _NO_LINE)
    count = tl.load(count_ptr + h * count_stride + tl.zeros([1, 1], tl.int32))
    count = tl.ceil(tl.minimum(count, n.to(tl.float64)).to(tl.float32))
    high = tl.maximum(tl.max(key, 1, keep_dims=True), _NO_LINE + 1)
    taken = _best(key, tl.zeros_like(high) + _NO_LINE, high, count, n, COLS) & ~spared
    _store(taken_ptr, head, line, taken, n, COUNTED)

"""The Triton kernels of `masks/visibility.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR, cdiv, power_of_2
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept, BlockGrid, last_from
from blocksparse.kernels.masks.grid_triton import (
    diagonal_blocks,
    load_positions,
    positions,
    rows_at,
    strides,
    tile_of_blocks,
    tile_of_grid,
    visible_blocks,
)
from blocksparse.kernels.masks.visibility import mix
from blocksparse.launch.launches import remembered

_HASH_ROWS, _HASH_COLS = 4, 256  # numbers per program


def counter_hash_triton(seed: int, *counters: Tensor) -> Tensor:
    """Launch the kernel; arguments as in `counter_hash`."""
    shape = torch.broadcast_shapes(*(x.shape for x in counters))
    out = torch.empty(shape, dtype=torch.int64, device=counters[0].device)
    depth, rows, cols = (1,) * (3 - len(shape)) + tuple(shape)
    given = tuple(x[(None,) * (3 - x.ndim)] for x in counters)
    _counter_hash_kernel[(cdiv(rows, _HASH_ROWS) * cdiv(cols, _HASH_COLS), depth)](
        given, tuple(strides(x) for x in given), out, mix(seed), rows, cols,
        COUNTERS=len(given), ROWS=_HASH_ROWS, COLS=_HASH_COLS,
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    """`mix` on uint32, whose sums and products wrap around as they should."""
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def folded(state, counter):
    """The hash of the counters so far (`state`) and of one more, which is hashed by itself before it is folded in."""
    return _mix(_mix(counter.to(tl.uint32)) ^ state.to(tl.uint32))


@remembered
@triton.jit(do_not_specialize=["state", "rows", "cols"])
def _counter_hash_kernel(
    counters, counter_strides, out_ptr, state, rows, cols,
    COUNTERS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(cols, COLS)
    z = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // wide * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(0) % wide * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    mixed = tl.zeros([ROWS, COLS], tl.uint32) + state.to(tl.uint32)
    for i in tl.static_range(COUNTERS):
        of_z, of_row, of_col, unit = counter_strides[i]
        at = (z * (of_z >> 4) + row * (of_row >> 4)) * unit + col * of_col
        mixed = folded(mixed, tl.load(counters[i] + at, mask=inside, other=0))
    tl.store(out_ptr + (z * rows + row) * cols + col, mixed.to(tl.int64), mask=inside)


_TILE = 4096  # blocks of a launch tile


def keep_visible_triton(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    always: AlwaysKept = NO_BLOCKS,
    segment: int | None = None,
    diagonal: bool = False,
) -> Tensor:
    """Launch the kernel; arguments as in `keep_visible`."""
    if keep is not None and keep.ndim < 4:
        keep = keep[(None,) * (4 - keep.ndim)]
    tensors, position_strides = positions(grid)
    own = (1, 1) if keep is None else _own(keep)
    # `torch.broadcast_shapes` takes the host as long as a launch.
    B, H = (max(own[axis], *(x.shape[axis] for x in tensors)) for axis in (0, 1))
    rows, cols = grid.q_first.shape[2], grid.k_first.shape[3]
    out = torch.empty((B, H, rows, cols), dtype=torch.bool, device=grid.q_first.device)
    tile = tile_of_blocks(_TILE)
    _keep_visible_kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
        keep, tensors, out, None if keep is None else strides(keep), position_strides, rows, cols, skipped,
        *numbers_of_always_kept(grid, always), None if segment is None else min(segment, FAR),
        N=n, DIAGONAL=diagonal, CAUSAL=grid.causal, WINDOW=grid.window, **tile,
        num_warps=4,
    )  # fmt: skip
    return out


def numbers_of_always_kept(grid: BlockGrid, always: AlwaysKept) -> tuple[int | None, ...]:
    """What `with_always_kept` takes of them: near, first, eta, state, first_row and from_query.

    Numbers beyond every position become `FAR`, so that the kernel's int32 hold them and their sums with positions.
    """
    eta, state = (None, None) if always.stride is None else (min(always.stride[0], FAR), mix(always.stride[1]))
    near, first, last = (None if x is None else min(x, FAR) for x in (always.near, always.first, always.last))
    return near, first, eta, state, grid.first_row, None if last is None else last_from(last, grid)


def _own(keep: Tensor) -> tuple[int, ...]:
    """Batch entries and heads of `keep` that may differ: 1 for an axis that was expanded."""
    return tuple(
        1 if stride == 0 else size for size, stride in zip(keep.shape[:2], keep.stride()[:2], strict=True)
    )


@triton.jit
def with_always_kept(
    keep, q_first, q_last, k_first, k_last, row, col, near, first, eta, state, first_row, from_query, CAUSAL: tl.constexpr
):  # fmt: skip
    """`keep` and the blocks of a launch tile that the numbers choose; those that are None are compiled away."""
    if near is not None:
        close = k_last >= q_first - near
        if not CAUSAL:
            close = close & (k_first <= q_last + near)
        keep = keep | close
    if first is not None:
        keep = keep | (k_first < first)
    if eta is not None:
        drawn = folded(state, first_row + row).to(tl.int64)
        keep = keep | ((col % eta).to(tl.int64) == (eta - drawn % eta) % eta)
    if from_query is not None:
        keep = keep | (q_last >= from_query)
    return keep


@remembered
@triton.jit(
    do_not_specialize=["rows", "skipped", "near", "first", "eta", "state", "first_row", "from_query", "segment"]
)
def _keep_visible_kernel(
    keep_ptr, position_ptrs, out_ptr, keep_strides, position_strides, rows, cols, skipped,
    near, first, eta, state, first_row, from_query, segment,
    N: tl.constexpr, DIAGONAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(
        position_ptrs, position_strides, b, h, row, col, there, inside
    )
    visible = visible_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    if keep_ptr is not None:
        keep_at = rows_at(keep_ptr, keep_strides, b, h, (row + skipped) // N) + col // N * keep_strides[3]
        keep = tl.load(keep_at, mask=inside, other=0) != 0
    else:
        keep = tl.zeros([ROWS, COLS], tl.int1)
    keep = with_always_kept(
        keep, q_first, q_last, k_first, k_last, row, col, near, first, eta, state, first_row, from_query, CAUSAL
    )  # fmt: skip
    if segment is not None:
        keep = keep | (k_first // segment == q_first // segment)
    keep = keep & visible
    if DIAGONAL:
        keep = keep | diagonal_blocks(visible, q_first, k_last, CAUSAL)
    out_row = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    tl.store(out_ptr + out_row * cols + col, keep, mask=inside)


_COLS = 128
_MOST_MEMBERS = 32  # that a program reads at a time


def any_head_triton(keep: Tensor, heads: int) -> Tensor:
    """Launch the kernel; arguments as in `any_head`."""
    return _launch(keep, heads, over_rows=False)


def visited_columns_triton(keep: Tensor, heads: int) -> Tensor:
    """Launch the kernel; arguments as in `visited_columns`."""
    return _launch(keep, heads, over_rows=True).squeeze(2)


def _launch(keep: Tensor, heads: int, *, over_rows: bool) -> Tensor:
    keep = keep.contiguous()
    B, H, rows, cols = keep.shape
    members, out_rows = H // heads, rows
    if over_rows:  # the rows of the heads of a group lie one behind another
        members, out_rows = members * rows, 1
    out = torch.empty((B, heads, out_rows, cols), dtype=torch.bool, device=keep.device)
    _any_head_kernel[(cdiv(cols, _COLS), out_rows, B * heads)](
        keep, out, members, out_rows, cols,
        FIRST=over_rows, MEMBERS=min(power_of_2(members), _MOST_MEMBERS), COLS=_COLS,
        num_warps=4,
    )  # fmt: skip
    return out


@remembered
@triton.jit(do_not_specialize=["members", "rows", "cols"])
def _any_head_kernel(
    keep_ptr, out_ptr, members, rows, cols, FIRST: tl.constexpr, MEMBERS: tl.constexpr, COLS: tl.constexpr
):
    """`keep` is `[groups, members, rows, cols]`, `out` `[groups, rows, cols]`; with `FIRST` column 0 is kept, too."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    row = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    member = tl.arange(0, MEMBERS)[:, None]
    found = tl.zeros([MEMBERS, COLS], tl.int32)
    for first in range(0, members, MEMBERS):
        at = ((group * members + first + member) * rows + row) * cols + col
        found |= tl.load(keep_ptr + at, mask=(first + member < members) & (col < cols), other=0).to(tl.int32)
    kept = tl.max(found, 0, keep_dims=True) != 0
    if FIRST:
        kept = kept | (col == 0)
    tl.store(out_ptr + (group * rows + row) * cols + col, kept, mask=col < cols)

"""The Triton kernel of `within_reach`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import FAR, cdiv
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
from blocksparse.kernels.positions.counter_hash import mix
from blocksparse.kernels.positions.counter_hash_triton import folded
from blocksparse.kernels.positions.places import NOWHERE, Places, last_from
from blocksparse.launch.launches import remembered

_TILE = 4096  # blocks of a launch tile


def within_reach_triton(
    keep: Tensor | None,
    grid: BlockGrid,
    n: int = 1,
    skipped: int = 0,
    *,
    places: Places = NOWHERE,
    segment: int | None = None,
    diagonal: bool = False,
) -> Tensor:
    """Launch the kernel; arguments as of `within_reach`."""
    if keep is not None and keep.ndim < 4:
        keep = keep[(None,) * (4 - keep.ndim)]
    tensors, position_strides = positions(grid)
    own = (1, 1) if keep is None else _own(keep)
    # `torch.broadcast_shapes` takes the host as long as a launch.
    B, H = (max(own[axis], *(x.shape[axis] for x in tensors)) for axis in (0, 1))
    rows, cols = grid.q_first.shape[2], grid.k_first.shape[3]
    out = torch.empty((B, H, rows, cols), dtype=torch.bool, device=grid.q_first.device)
    tile = tile_of_blocks(_TILE)
    _kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
        keep, tensors, out, None if keep is None else strides(keep), position_strides, rows, cols, skipped,
        *numbers_of_places(grid, places), None if segment is None else min(segment, FAR),
        N=n, DIAGONAL=diagonal, CAUSAL=grid.causal, WINDOW=grid.window, **tile,
        num_warps=4,
    )  # fmt: skip
    return out


def numbers_of_places(grid: BlockGrid, places: Places) -> tuple[int | None, ...]:
    """What `with_places` takes of places: near, first, eta, state, first_row and from_query.

    Numbers beyond every position become `FAR`, so that the kernel's int32 hold them and their sums with positions.
    """
    eta, state = (None, None) if places.stride is None else (min(places.stride[0], FAR), mix(places.stride[1]))
    near, first, last = (None if x is None else min(x, FAR) for x in (places.near, places.first, places.last))
    return near, first, eta, state, grid.first_row, None if last is None else last_from(last, grid)


def _own(keep: Tensor) -> tuple[int, ...]:
    """Batch entries and heads of `keep` that may differ: 1 for an axis that was expanded."""
    return tuple(
        1 if stride == 0 else size for size, stride in zip(keep.shape[:2], keep.stride()[:2], strict=True)
    )


@triton.jit
def with_places(
    keep,
    q_first,
    q_last,
    k_first,
    k_last,
    row,
    col,
    near,
    first,
    eta,
    state,
    first_row,
    from_query,
    CAUSAL: tl.constexpr,
):
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
def _kernel(
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
    reachable = reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    if keep_ptr is not None:
        keep_at = rows_at(keep_ptr, keep_strides, b, h, (row + skipped) // N) + col // N * keep_strides[3]
        keep = tl.load(keep_at, mask=inside, other=0) != 0
    else:
        keep = tl.zeros([ROWS, COLS], tl.int1)
    keep = with_places(
        keep, q_first, q_last, k_first, k_last, row, col, near, first, eta, state, first_row, from_query, CAUSAL
    )  # fmt: skip
    if segment is not None:
        keep = keep | (k_first // segment == q_first // segment)
    keep = keep & reachable
    if DIAGONAL:
        keep = keep | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    out_row = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    tl.store(out_ptr + out_row * cols + col, keep, mask=inside)

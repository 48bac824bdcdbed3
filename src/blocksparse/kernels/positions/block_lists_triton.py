"""The Triton kernel of `block_lists`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.memory import empty_together
from blocksparse.kernels.common.sizes import cdiv, index_dtype, power_of_2
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import full_blocks, positions, rows_at, strides, tile
from blocksparse.launch.launches import remembered

_ENTRIES = 512  # blocks of a launch tile, if rows are short
# Blocks of a row at a time; fewer than 2^15, so that two counts of them fit one int32.
_NARROWEST, _WIDEST = 256, 1024
_PER_THREAD = 16  # blocks of a launch tile per thread


def block_lists_triton(keep: Tensor, grid: BlockGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as of `block_lists`."""
    B, H, rows, cols = keep.shape
    index = torch.empty(keep.shape, dtype=index_dtype(cols), device=keep.device)
    full_count, partial_count = empty_together(torch.int32, keep.device, (B, H, rows), (B, H, rows))
    wide = min(max(power_of_2(cols), _NARROWEST), _WIDEST)
    high = max(_ENTRIES // wide, 1)
    _kernel[(cdiv(rows, high), H, B)](
        keep, *positions(grid), grid.k_whole, full_count, partial_count, index,
        strides(keep), strides(grid.k_whole),
        rows, cols,
        CAUSAL=grid.causal, WINDOW=grid.window, ROWS=high, COLS=wide, WHOLE=cols <= wide,
        num_warps=high * wide // (32 * _PER_THREAD),
    )  # fmt: skip
    return full_count, partial_count, index


@triton.jit
def _kinds(
    keep_at,
    keep_stride,
    k_first_at,
    k_first_stride,
    k_last_at,
    k_last_stride,
    k_whole_at,
    k_whole_stride,
    q_first,
    q_last,
    col,
    inside,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which blocks of a launch tile are kept and full, and which are kept and partial, as 0 or 1."""
    keep = tl.load(keep_at + col * keep_stride, mask=inside, other=0) != 0
    k_last = tl.load(k_last_at + col * k_last_stride, mask=inside, other=-1)
    k_whole = tl.load(k_whole_at + col * k_whole_stride, mask=inside, other=0)
    k_first = k_last
    if WINDOW is not None:
        k_first = tl.load(k_first_at + col * k_first_stride, mask=inside, other=0)
    full = keep & full_blocks(q_first, q_last, k_first, k_last, k_whole, CAUSAL, WINDOW)
    return full.to(tl.int32), keep.to(tl.int32) - full.to(tl.int32)


@triton.jit
def _list(index_at, at, full, partial, full_place, partial_place):
    """Store the kept blocks of a launch tile: full ones after `full_place`, the others after `partial_place`."""
    INDEX: tl.constexpr = index_at.dtype.element_ty
    seen = tl.cumsum(full + (partial << 16), 1)  # partial blocks are counted above the lower 16 bits
    place = tl.where(full != 0, full_place + (seen & 0xFFFF), partial_place + (seen >> 16))
    tl.store(index_at + place, tl.broadcast_to(at.to(INDEX), place.shape), mask=(full + partial) != 0)


@remembered
@triton.jit(do_not_specialize=["rows"])
def _kernel(
    keep_ptr, positions, position_strides, k_whole_ptr, full_count_ptr, partial_count_ptr, index_ptr,
    keep_strides, k_whole_strides,
    rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """With `WHOLE` a launch tile holds whole rows; else each row is walked twice, to count and then to list."""
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    q_first = tl.load(rows_at(positions[0], position_strides[0], b, h, row), mask=there, other=0)
    q_last = q_first
    if WINDOW is not None:
        q_last = tl.load(rows_at(positions[1], position_strides[1], b, h, row), mask=there, other=0)
    keep_at = rows_at(keep_ptr, keep_strides, b, h, row)
    k_first_at = rows_at(positions[2], position_strides[2], b, h, row)
    k_last_at = rows_at(positions[3], position_strides[3], b, h, row)
    k_whole_at = rows_at(k_whole_ptr, k_whole_strides, b, h, row)
    out_row = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    index_at = index_ptr + out_row * cols

    full_count = tl.zeros([ROWS, 1], tl.int32)
    partial_count = tl.zeros([ROWS, 1], tl.int32)
    if WHOLE:
        full, partial = _kinds(
            keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
            q_first, q_last, col, there & (col < cols), CAUSAL, WINDOW,
        )  # fmt: skip
        full_count += tl.sum(full, 1, keep_dims=True)
        partial_count += tl.sum(partial, 1, keep_dims=True)
        _list(index_at, col, full, partial, full_count * 0 - 1, full_count - 1)
    else:
        for start in range(0, cols, COLS):
            at = start + col
            full, partial = _kinds(
                keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
                q_first, q_last, at, there & (at < cols), CAUSAL, WINDOW,
            )  # fmt: skip
            full_count += tl.sum(full, 1, keep_dims=True)
            partial_count += tl.sum(partial, 1, keep_dims=True)
        full_place = tl.zeros([ROWS, 1], tl.int32) - 1
        partial_place = full_count - 1
        for start in range(0, cols, COLS):
            at = start + col
            full, partial = _kinds(
                keep_at, keep_strides[3], k_first_at, position_strides[2][3], k_last_at, position_strides[3][3], k_whole_at, k_whole_strides[3],
                q_first, q_last, at, there & (at < cols), CAUSAL, WINDOW,
            )  # fmt: skip
            _list(index_at, at, full, partial, full_place, partial_place)
            full_place += tl.sum(full, 1, keep_dims=True)
            partial_place += tl.sum(partial, 1, keep_dims=True)
    tl.store(full_count_ptr + out_row, full_count, mask=there)
    tl.store(partial_count_ptr + out_row, partial_count, mask=there)
    listed = full_count + partial_count
    for start in range(0, cols, COLS):
        at = start + col
        nothing = tl.zeros([ROWS, COLS], index_ptr.dtype.element_ty)
        tl.store(index_at + at, nothing, mask=there & (at < cols) & (at >= listed))

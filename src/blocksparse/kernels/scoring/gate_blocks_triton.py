"""The Triton kernel of `gate_blocks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.hardware import device_of
from blocksparse.kernels.common.launches_triton import remembered
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    load_positions,
    positions,
    reachable_blocks,
    rows_at,
    strides,
    tile_of_blocks,
    tile_of_grid,
)

_TILE = 4096  # blocks of a launch tile


def gate_blocks_triton(
    values: Tensor, unlike_row: Tensor, unlike_col: Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `gate_blocks`."""
    B, H, rows, cols = values.shape
    gated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    out = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    tensors, position_strides = positions(grid)
    tile = tile_of_blocks(_TILE)
    with device_of(values):
        _kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
            values, unlike_row, unlike_col, forced, gated, out, tensors,
            strides(values), strides(unlike_row), strides(unlike_col), None if forced is None else strides(forced), position_strides,
            rows, cols,
            CAUSAL=grid.causal, WINDOW=grid.window, **tile,
            num_warps=4,
        )  # fmt: skip
    return gated, out


@remembered
@triton.jit(do_not_specialize=["rows"])
def _kernel(
    values_ptr, unlike_row_ptr, unlike_col_ptr, forced_ptr, gated_ptr, out_ptr, position_ptrs,
    values_strides, unlike_row_strides, unlike_col_strides, forced_strides, position_strides,
    rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    unlike_row = tl.load(rows_at(unlike_row_ptr, unlike_row_strides, b, h, row), mask=there, other=0) != 0
    col_at = rows_at(unlike_col_ptr, unlike_col_strides, b, h, row) + col * unlike_col_strides[3]
    unlike_col = tl.load(col_at, mask=inside, other=0) != 0
    chosen = unlike_row | unlike_col
    if forced_ptr is not None:
        forced_at = rows_at(forced_ptr, forced_strides, b, h, row) + col * forced_strides[3]
        chosen = chosen | (tl.load(forced_at, mask=inside, other=0) != 0)
    q_first, q_last, k_first, k_last = load_positions(
        position_ptrs, position_strides, b, h, row, col, there, inside
    )
    at = ((b * tl.num_programs(1) + h).to(tl.int64) * rows + row) * cols + col
    tl.store(
        out_ptr + at, chosen & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW), mask=inside
    )
    values_at = rows_at(values_ptr, values_strides, b, h, row) + col * values_strides[3]
    tl.store(gated_ptr + at, tl.load(values_at, mask=inside & ~unlike_col, other=0.0), mask=inside)

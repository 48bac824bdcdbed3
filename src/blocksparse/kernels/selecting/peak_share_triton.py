"""The Triton kernel of `peak_share`: a program holds whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.strides_triton import head_strides
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.block_grid_triton import (
    diagonal_blocks,
    load_blocks,
    load_positions,
    positions,
    reachable_blocks,
    rows_at,
    strides,
    tile,
)
from blocksparse.kernels.selecting.row_search_triton import width_of_rows
from blocksparse.launch.launches import remembered


def peak_share_triton(values: Tensor, forced: Tensor | None, alpha: Tensor, grid: BlockGrid) -> Tensor:
    """Launch the kernel; arguments as of `peak_share`."""
    B, H, rows, cols = values.shape
    keep = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    wide, num_warps = width_of_rows(cols)
    _kernel[(rows, H, B)](
        values, forced, alpha, keep, *positions(grid),
        strides(values), None if forced is None else strides(forced), head_strides(alpha)[1], strides(keep),
        rows, cols,
        CAUSAL=grid.causal, WINDOW=grid.window, ROWS=1, COLS=wide,
        num_warps=num_warps,
    )  # fmt: skip
    return keep


@remembered
@triton.jit(do_not_specialize=["alpha_stride", "rows"])
def _kernel(
    values_ptr, forced_ptr, alpha_ptr, keep_ptr, positions, position_strides,
    values_strides, forced_strides, alpha_stride, keep_strides, rows, cols,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile(ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    q_first, q_last, k_first, k_last = load_positions(positions, position_strides, b, h, row, col, there, inside)
    reachable = inside & reachable_blocks(q_first, q_last, k_first, k_last, CAUSAL, WINDOW)
    values = load_blocks(values_ptr, values_strides, b, h, row, col, reachable, 0.0)
    best = tl.max(tl.where(values != values, float("inf"), values), 1, keep_dims=True)  # NaN is the greatest
    alpha = tl.load(alpha_ptr + h * alpha_stride + tl.zeros_like(row)).to(tl.float32)
    keep = (values >= alpha * best) & (values > 0.0)
    if forced_ptr is not None:
        keep = keep | (load_blocks(forced_ptr, forced_strides, b, h, row, col, inside, 0) != 0)
    keep = (keep & reachable) | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    tl.store(rows_at(keep_ptr, keep_strides, b, h, row) + col, keep, mask=inside)

"""The Triton kernel of `gate_blocks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import head_strides
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
from blocksparse.launch.launches import remembered

_TILE = 4096  # blocks of a launch tile


def gate_blocks_triton(
    values: Tensor, of_q: Tensor, of_k: Tensor, theta: float | Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `gate_blocks`."""
    B, H, rows, cols = values.shape
    gated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    out = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    tensors, position_strides = positions(grid)
    tile = tile_of_blocks(_TILE)
    of_head = theta if isinstance(theta, Tensor) else None
    _kernel[(cdiv(rows, tile["ROWS"]) * cdiv(cols, tile["COLS"]), H, B)](
        values, of_q.contiguous(), of_k.contiguous(), of_head, forced, gated, out, tensors,
        strides(values), None if of_head is None else head_strides(of_head)[1], None if forced is None else strides(forced),
        position_strides, rows, cols, H // of_k.shape[1], float(theta) if of_head is None else None,
        CAUSAL=grid.causal, WINDOW=grid.window, **tile,
        num_warps=4,
    )  # fmt: skip
    return gated, out


@remembered
@triton.jit(do_not_specialize=["rows", "group"])
def _kernel(
    values_ptr, of_q_ptr, of_k_ptr, theta_ptr, forced_ptr, gated_ptr, out_ptr, position_ptrs,
    values_strides, theta_stride, forced_strides, position_strides,
    rows, cols, group, theta,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    if theta_ptr is not None:
        theta = tl.load(theta_ptr + h * theta_stride).to(tl.float32)
    heads = tl.num_programs(1)
    of_q = tl.load(of_q_ptr + (b * heads + h).to(tl.int64) * rows + row, mask=there, other=0.0)
    of_k = tl.load(
        of_k_ptr + (b * (heads // group) + h // group).to(tl.int64) * cols + col, mask=col < cols, other=0.0
    )
    unlike_col = (of_k <= theta) | (of_k != of_k)  # [1, COLS]; NaN is not similar
    chosen = (of_q <= theta) | (of_q != of_q) | unlike_col
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

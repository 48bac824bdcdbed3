"""The Triton kernel of `within_reach`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.block_grid import BlockGrid
from blocksparse.kernels.block_grid_triton import (
    diagonal_blocks,
    load_positions,
    positions,
    reachable_blocks,
    rows_at,
    strides,
    tile_of_grid,
)
from blocksparse.kernels.hardware import device_of
from blocksparse.kernels.sizes import cdiv, power_of_2

_TILE = 4096  # blocks at a time


def within_reach_triton(
    keep: Tensor, grid: BlockGrid, n: int = 1, skipped: int = 0, *, diagonal: bool = False
) -> Tensor:
    """Launch the kernel; arguments as of `within_reach`."""
    tensors, position_strides = positions(grid)
    B, H, rows, cols = torch.broadcast_shapes(*(x.shape for x in tensors), (*_own(keep), 1, 1))
    out = torch.empty((B, H, rows, cols), dtype=torch.bool, device=keep.device)
    wide = min(power_of_2(cols), 256)
    high = min(power_of_2(rows), _TILE // wide)
    with device_of(keep):
        _kernel[(cdiv(rows, high) * cdiv(cols, wide), H, B)](
            keep, tensors, out, strides(keep), position_strides, rows, cols, skipped,
            N=n, DIAGONAL=diagonal, CAUSAL=grid.causal, ROWS=high, COLS=wide,
            num_warps=4,
        )  # fmt: skip
    return out


def _own(keep: Tensor) -> tuple[int, int]:
    """Batch entries and heads that may differ: an expanded axis has one."""
    return tuple(
        1 if stride == 0 else size for size, stride in zip(keep.shape[:2], keep.stride()[:2], strict=True)
    )


@triton.jit(do_not_specialize=["rows", "skipped"])
def _kernel(
    keep_ptr, position_ptrs, out_ptr, keep_strides, position_strides, rows, cols, skipped,
    N: tl.constexpr, DIAGONAL: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    b, h, row, col = tile_of_grid(cols, ROWS, COLS)
    there = row < rows
    inside = there & (col < cols)
    keep_at = rows_at(keep_ptr, keep_strides, b, h, (row + skipped) // N) + col // N * keep_strides[3]
    keep = tl.load(keep_at, mask=inside, other=0) != 0
    q_first, q_last, k_first, k_last = load_positions(
        position_ptrs, position_strides, b, h, row, col, there, inside
    )
    reachable = reachable_blocks(q_last, k_first, k_last, CAUSAL)
    keep = keep & reachable
    if DIAGONAL:
        keep = keep | diagonal_blocks(reachable, q_first, k_last, CAUSAL)
    out_row = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    tl.store(out_ptr + out_row * cols + col, keep, mask=inside)

"""Forces blocks in rows and columns whose tokens are too unlike each other for one score to speak for them.

    forced[row, col] = reachable and (unlike_row[row] or unlike_col[col] or forced before)
    values[row, col] = 0 where unlike_col[col]

On GPUs one kernel reads and writes each score once. CPU tensors and float64 take plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.positions.block_grid import BlockGrid


def gate_blocks(
    values: Tensor, unlike_row: Tensor, unlike_col: Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Gated `values` `[B, H, rows, cols]`, in memory of their own, and `forced`, bool of the same shape.

    Args:
        unlike_row: `[B|1, H|1, rows, 1]` bool, rows to force.
        unlike_col: `[B|1, H|1, rows|1, cols]` bool, columns to force, whose blocks then hold nothing.
        forced: `[B|1, H|1, rows, cols]` bool, what was forced before.
    """
    if values.is_cuda and values.dtype == torch.float32:
        from blocksparse.kernels.scoring.gate_blocks_triton import gate_blocks_triton

        return gate_blocks_triton(values, unlike_row, unlike_col, forced, grid)
    return gate_blocks_reference(values, unlike_row, unlike_col, forced, grid)


def gate_blocks_reference(
    values: Tensor, unlike_row: Tensor, unlike_col: Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    chosen = unlike_row | unlike_col
    chosen = chosen if forced is None else chosen | forced
    return values.masked_fill(unlike_col, 0.0), (chosen & grid.reachable).expand(values.shape)

"""The indices of rows and columns by which random rules draw numbers for blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.positions.counter_hash import counter_hash as counter_hash

BITS = 32


def block_indices(grid: Grid, *, of_chunk: bool = False) -> tuple[Tensor, Tensor]:
    """The index of every row, `[rows, 1]`, and of every column, `[cols]`, int64.

    Rows are counted in the whole prompt, so that a block has the same index however the prompt is chunked. With
    `of_chunk` they are counted from the start of the chunk.
    """
    device = grid.q_position.device
    skipped = 0 if of_chunk else grid.first_row
    rows = torch.arange(skipped, skipped + grid.rows, device=device)
    return rows.unsqueeze(1), torch.arange(grid.cols, device=device)

"""The blocks that are worth a share of their row's best one.

    keep[b, h, row, col] = values[b, h, row, col] >= alpha[h] max_col values[b, h, row] > 0, or forced, or on the diagonal

as far as queries can see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.selecting.top_cdf import MAX_COLS


@on_gpus(torch.float32, where=lambda values, *_: values.shape[-1] <= MAX_COLS)
def peak_share(values: Tensor, forced: Tensor | None, alpha: Tensor, grid: BlockGrid) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept in any case.
        alpha: `[1, H|1, 1, 1]` float64, rounded to the dtype of values.
    """
    values = values.where(grid.reachable, 0.0)
    keep = (values >= alpha.to(values.dtype) * values.amax(-1, keepdim=True)) & (values > 0)
    keep = keep if forced is None else keep | forced
    return within_reach(keep, grid, diagonal=True)

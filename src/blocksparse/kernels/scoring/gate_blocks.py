"""Forces blocks in rows and columns whose tokens are too unlike each other for one score to speak for them.

unlike[block] = not similarity[block] > theta
forced[row, col] = reachable and (unlike[row] or unlike[col] or forced before)
values[row, col] = 0 where unlike[col]
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid


@on_gpus(torch.float32)
def gate_blocks(
    values: Tensor, of_q: Tensor, of_k: Tensor, theta: float | Tensor, forced: Tensor | None, grid: BlockGrid
) -> tuple[Tensor, Tensor]:
    """Gated `values` `[B, Hq, rows, cols]`, in memory of their own, and `forced`, bool of the same shape.

    Args:
        of_q: `[B, Hq, rows]`, the similarity of the tokens of query blocks. NaN is not similar.
        of_k: `[B, H, cols]`, that of key blocks; `H` divides Hq.
        theta: a number, or `[1, Hq|1, 1, 1]`, rounded to the dtype of similarities.
        forced: `[B|1, Hq|1, rows, cols]` bool, what was forced before.
    """
    if not isinstance(theta, Tensor):
        theta = torch.full((1, 1, 1, 1), theta, dtype=torch.float64, device=values.device)
    theta, of_k = theta.to(of_q.dtype), of_k.repeat_interleave(values.shape[1] // of_k.shape[1], dim=1)
    unlike_row, unlike_col = ~(of_q.unsqueeze(-1) > theta), ~(of_k.unsqueeze(-2) > theta)
    chosen = unlike_row | unlike_col
    chosen = chosen if forced is None else chosen | forced
    return values.masked_fill(unlike_col, 0.0), (chosen & grid.reachable).expand(values.shape)

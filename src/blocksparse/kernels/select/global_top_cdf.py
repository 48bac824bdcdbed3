"""The smallest set of blocks that holds a share of a whole head's mass: all rows of a head have one budget.

It is `top_cdf` with sums over the head: blocks are taken heaviest first, ties by place, until `mass` of the head's total is
reached. Weights are rounded to integers, called ticks, of which the heaviest block of a head has up to 2^30 (`top_cdf.py`).
Sums of integers do not depend on their order. So the GPU's kernels, which search for the lightest block that is taken,
choose the same blocks as the plain torch below, which sorts. With over 4 million blocks in a head, fp64 may round a target
by some ticks, a billionth of a block each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.masks.grid import BlockGrid
from blocksparse.kernels.select.top_cdf import running_share


@on_gpus(torch.float32)
def global_top_cdf(
    values: Tensor, forced: Tensor | None, mass: Tensor, grid: BlockGrid, *, crossing: bool, heads: Heads = None
) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    The diagonal is kept in any case.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept in any case, but ranked and counted as other blocks are.
        mass: `[1, H|1, 1, 1]` float64, in (0, 1]. It is rounded to fp32, as shares are. 1 keeps what is visible.
        crossing: also keep the block with which the sum reaches the target.
        heads: those whose mask is asked for. In the others entries have no meaning.
    """
    mass, visible = mass.float(), grid.visible
    always = grid.diagonal if forced is None else grid.diagonal | forced
    share = running_share(values.masked_fill(~visible, 0.0).flatten(2))  # [B, H, rows * cols]
    taken = share.before < mass[..., 0] if crossing else share.after <= mass[..., 0]
    return (share.put_back(taken).view(values.shape) | always | (mass >= 1)) & visible

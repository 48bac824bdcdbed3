"""The smallest set of blocks that holds a share of a whole head's mass: all rows of a head have one budget.

As `top_cdf`, with the sum over the head: the heaviest blocks first, ties by place, until `mass` of the head's total is
reached. Sums are of integers (`ticks`: 2^30 to the heaviest block of a head), so the choice does not depend on their
order: the GPU's kernels, which search for the lightest block taken, and the plain torch below, which sorts, choose the
same blocks. With over 4 million blocks in a head, fp64 may round a target by some ticks, a billionth of a block each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.selecting.running_share import running_share


def global_top_cdf(
    values: Tensor, forced: Tensor | None, mass: Tensor, grid: BlockGrid, *, crossing: bool
) -> Tensor:
    """Blocks kept, `[B, H, rows, cols]` bool, of `values` `[B, H, rows, cols]`; the diagonal is, in any case.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept in any case, and not counted apart from others.
        mass: `[1, H|1, 1, 1]` float64, in (0, 1]; it is rounded to fp32, as shares are. 1 keeps what is reachable.
        crossing: keep the block that takes the sum from below the target to it or over it.
    """
    if values.is_cuda and values.dtype == torch.float32:
        from blocksparse.kernels.selecting.global_top_cdf_triton import global_top_cdf_triton

        return global_top_cdf_triton(values, forced, mass, grid, crossing=crossing)
    return global_top_cdf_reference(values, forced, mass, grid, crossing=crossing)


def global_top_cdf_reference(
    values: Tensor, forced: Tensor | None, mass: Tensor, grid: BlockGrid, *, crossing: bool
) -> Tensor:
    """The same in plain torch."""
    mass, reachable = mass.float(), grid.reachable
    always = grid.diagonal if forced is None else grid.diagonal | forced
    share = running_share(values.masked_fill(~reachable, 0.0).flatten(2))  # [B, H, rows * cols]
    taken = share.before < mass[..., 0] if crossing else share.after <= mass[..., 0]
    return (share.put_back(taken).view(values.shape) | always | (mass >= 1)) & reachable

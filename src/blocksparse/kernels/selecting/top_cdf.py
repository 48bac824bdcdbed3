"""The smallest set of blocks that holds a share of each row's mass.

Forced blocks are taken first, then the heaviest, ties by column, until `mass` of the row's total is reached. Weights are
rounded to integers, called ticks, of which the heaviest block of a row has up to 2^30 (`running_share.py`). Sums of
integers do not depend on their order, so the GPU's kernel, which searches for the lightest block that is taken, the
kernel compiled for CPUs, which takes blocks from a heap, and the plain torch below, which sorts, choose the same blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.positions.block_grid import BlockGrid
from blocksparse.kernels.positions.places import NOWHERE, Places
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.kernels.scoring import cpu_choices, cpu_scores
from blocksparse.kernels.selecting.running_share import running_share

MAX_COLS = 32768
"""Columns of the longest row that the kernel takes."""


def top_cdf(
    values: Tensor,
    forced: Tensor | None,
    mass: float | Tensor,
    grid: BlockGrid,
    *,
    crossing: bool,
    places: Places = NOWHERE,
) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    The diagonal is kept in any case.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept and counted first.
        mass: a number, or `[1, H|1, 1, 1]`, in (0, 1]; it is rounded to fp32, as shares are. 1 keeps what is reachable.
        crossing: also keep the block that takes the sum from below the target to the target or above it. Without it,
            the heaviest block that is not forced is kept in any case.
        places: by which further blocks are kept.
    """
    if values.is_cuda and values.dtype == torch.float32 and values.shape[-1] <= MAX_COLS:
        from blocksparse.kernels.selecting.top_cdf_triton import top_cdf_triton

        return top_cdf_triton(values, forced, mass, grid, crossing, places)
    on_cpu = values.dtype == torch.float32 and cpu_scores.takes(values)
    return top_cdf_reference(values, forced, mass, grid, crossing, places, compiled=on_cpu)


def top_cdf_reference(
    values: Tensor,
    forced: Tensor | None,
    mass: float | Tensor,
    grid: BlockGrid,
    crossing: bool,
    places: Places = NOWHERE,
    *,
    compiled: bool = False,
) -> Tensor:
    """The same in plain torch, but for the shares if these are taken by the kernel compiled for a CPU."""
    if not isinstance(mass, Tensor):
        mass = torch.full((1, 1, 1, 1), mass, dtype=torch.float64, device=values.device)  # a host copy would wait
    mass, reachable = mass.float(), grid.reachable
    always = grid.diagonal if forced is None else grid.diagonal | forced
    if compiled:
        keep = cpu_choices.shares_on_cpu(values, forced, mass, reachable, always, crossing=crossing)
    else:
        share = running_share(values.masked_fill(~reachable, 0.0), first=forced)
        if crossing:
            taken = share.before < mass
        else:
            before = 0 if forced is None else forced.expand(share.ticks.shape).sum(-1, keepdim=True)
            rank = torch.arange(values.shape[-1], device=mass.device)
            taken = (share.after <= mass) | ((rank == before) & (share.ticks > 0))
        keep = (share.put_back(taken) | always) | (mass >= 1)
    return within_reach.plain(keep, grid, places=places)

"""Blocks that hold a share of their row's mass, or are worth a share of its best one.

`top_cdf` takes the smallest set of blocks that holds a share of each row's mass. Forced blocks are taken first, then the
heaviest, ties by column, until `mass` of the row's total is reached. Weights are rounded to integers, called ticks, of which
the heaviest block of a row has up to 2^30 (`top_cdf.py`). Sums of integers do not depend on their order, so three
implementations choose the same blocks. The GPU's kernel searches for the lightest block that is taken, the kernel compiled
for CPUs takes blocks from a heap, and the plain torch below sorts.

`row_share` takes the blocks with at least a share of their row's best block, or of their row's mass:

    peak:  keep[b, h, row, col] = values[b, h, row, col] >= alpha[h] max_col values[b, h, row] > 0

    row:   keep[b, h, row, col] = values[b, h, row, col] >= alpha[h] sum_col values[b, h, row] / sqrt(n[row]) > 0

with the number `n` of blocks that the row can reach; and those that are forced, on the diagonal, or in `always`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import compiled, on_gpus
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept, BlockGrid
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.score import cpu_scores


class RunningShare(NamedTuple):
    """Entries along the last axis, in the order in which they are taken; all tensors have one shape."""

    order: Tensor  # int64, the place of each entry in the tensor that it came from
    ticks: Tensor  # int64, the weight of each entry
    before: Tensor  # fp32, the share of the total that is taken before the entry
    after: Tensor  # fp32, the share that is taken with it

    def put_back(self, taken: Tensor) -> Tensor:
        """`taken`, a bool for each entry in the order of taking, put back into the order of columns."""
        return torch.empty_like(taken).scatter_(-1, self.order, taken)


def running_share(values: Tensor, first: Tensor | None = None) -> RunningShare:
    """Take non-negative `values` heaviest first, those of the mask `first` before all others, ties by place.

    Sums are of integers, so the shares do not depend on the order of summation: the same values give the same
    shares on every device. They are fp32, the precision of scores, so that rounding does not push a sum over a
    round target.
    """
    weight = _ticks(values)
    key = weight if first is None else weight.masked_fill(first, torch.iinfo(torch.int64).max)
    order = key.argsort(dim=-1, descending=True, stable=True)
    ranked = weight.gather(-1, order)
    reached = ranked.cumsum(-1)
    total = reached[..., -1:].double()
    return RunningShare(order, ranked, ((reached - ranked) / total).float(), (reached / total).float())


def _ticks(values: Tensor) -> Tensor:
    """Non-negative fp32 values as integers, from 2^29 to just below 2^30 for the heaviest one of a row; NaN counts as 0.

    The scale is a power of two, so only the rounding to integers is inexact; a sum of 2^23 entries stays below 2^53.
    """
    values = values.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).clamp_min(0.0)
    exponent = torch.frexp(values.amax(-1, keepdim=True)).exponent
    scale = (1053 - exponent.long() << 52).view(torch.float64)  # 2^(30 - exponent) in fp64; fp32 may not hold it
    return (values.double() * scale).round().long()


MAX_COLS = 32768
"""Columns of the longest row that the kernel takes."""

Of = Literal["peak", "row"]


def _by_heap(
    values: Tensor,
    forced: Tensor | None,
    mass: float | Tensor,
    grid: BlockGrid,
    *,
    crossing: bool,
    always: AlwaysKept = NO_BLOCKS,
) -> Tensor:
    """`top_cdf` by the kernel compiled for a CPU."""
    at_least = grid.diagonal if forced is None else grid.diagonal | forced
    mass = _as_tensor(mass, values)
    keep = cpu_scores.shares_on_cpu(values, forced, mass, grid.visible, at_least, crossing=crossing)
    return keep_visible.reference(keep, grid, always=always)


@on_gpus(torch.float32, where=lambda values, *_, **__: values.shape[-1] <= MAX_COLS)
@compiled(_by_heap, lambda values, *_, **__: values.dtype == torch.float32 and cpu_scores.takes(values))
def top_cdf(
    values: Tensor,
    forced: Tensor | None,
    mass: float | Tensor,
    grid: BlockGrid,
    *,
    crossing: bool,
    always: AlwaysKept = NO_BLOCKS,
) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    The diagonal is kept in any case.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept and counted first.
        mass: a number, or `[1, H|1, 1, 1]`, in (0, 1]. It is rounded to fp32, as shares are. 1 keeps what is visible.
        crossing: also keep the block with which the sum reaches the target. Without it, the heaviest block that is
            not forced is kept in any case.
        always: further blocks to keep, by position.
    """
    mass, visible = _as_tensor(mass, values), grid.visible
    at_least = grid.diagonal if forced is None else grid.diagonal | forced
    share = running_share(values.masked_fill(~visible, 0.0), first=forced)
    if crossing:
        taken = share.before < mass
    else:
        before = 0 if forced is None else forced.expand(share.ticks.shape).sum(-1, keepdim=True)
        rank = torch.arange(values.shape[-1], device=mass.device)
        taken = (share.after <= mass) | ((rank == before) & (share.ticks > 0))
    return keep_visible.reference((share.put_back(taken) | at_least) | (mass >= 1), grid, always=always)


def _as_tensor(number: float | Tensor, values: Tensor) -> Tensor:
    """In fp32; a number is filled in, since the host would wait for a copy."""
    if not isinstance(number, Tensor):
        number = torch.full((1, 1, 1, 1), number, dtype=torch.float64, device=values.device)
    return number.float()


@on_gpus(torch.float32, where=lambda values, *_, **__: values.shape[-1] <= MAX_COLS)
def row_share(
    values: Tensor,
    forced: Tensor | None,
    alpha: float | Tensor,
    grid: BlockGrid,
    *,
    of: Of,
    always: AlwaysKept = NO_BLOCKS,
) -> Tensor:
    """Which blocks are kept, `[B, H, rows, cols]` bool, by their `values` `[B, H, rows, cols]`.

    Args:
        forced: `[B|1, H|1, rows|1, cols|1]` bool, kept in any case.
        alpha: a number, or `[1, H|1, 1, 1]`. Rounded to fp32.
        of: what `alpha` is a share of: the row's best block, or the row.
        always: further blocks to keep, by position.
    """
    visible = grid.visible
    values = values.where(visible, 0.0)
    alpha = _as_tensor(alpha, values)
    if of == "peak":
        keep = (values >= alpha.to(values.dtype) * values.amax(-1, keepdim=True)) & (values > 0)
    else:
        ticks = _ticks(values)
        root = visible.sum(-1, keepdim=True).double().sqrt()
        least = alpha.double() * ticks.sum(-1, keepdim=True).double()
        keep = (ticks.double() * root >= least) & (ticks > 0)
    keep = keep if forced is None else keep | forced
    return keep_visible.reference(keep, grid, always=always, diagonal=True)

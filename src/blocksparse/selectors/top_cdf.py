"""Keep the smallest set of blocks that holds a share of the row's mass (PBS-Attn algorithm 2, and others)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.per_head import PerHead, check, over_blocks, per_head
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class TopCdf(Selector[BlockMass, BlockMask]):
    """Take forced blocks first, then the heaviest, until `mass` of the row's total is reached.

    Sums are of integers, so the choice does not depend on the order of summation: the same scores give the
    same mask on every device.

    Args:
        mass: share of the row's total mass, in (0, 1]; a number, or one per query head. 1 keeps every
            reachable block.
        crossing: keep the block that takes the sum from below the target to it or over it (PBS-Attn
            algorithm 2, BFLA, XAttention). SpargeAttn drops it, but keeps the heaviest scored block of a row.
    """

    mass: PerHead = field(
        default=0.9, converter=per_head, validator=check("in (0, 1]", lambda x: (x > 0) & (x <= 1))
    )
    crossing: bool = field(default=True, kw_only=True)

    def __call__(self, scores: BlockMass) -> BlockMask:
        grid = scores.grid
        mass = over_blocks(self.mass, scores.values).float()
        reachable = grid.reachable
        ticks = _ticks(scores.values.masked_fill(~reachable, 0.0))  # [B, Hq, rows, cols] int64
        always = grid.diagonal if scores.forced is None else grid.diagonal | scores.forced
        first = ticks if scores.forced is None else ticks.masked_fill(scores.forced, torch.iinfo(torch.int64).max)
        order = first.argsort(dim=-1, descending=True, stable=True)
        ranked = ticks.gather(-1, order)
        reached = ranked.cumsum(-1)
        total = reached[..., -1:].double()
        # Shares are compared in fp32, the precision of scores: rounding must not push a sum over a round target.
        if self.crossing:
            taken = ((reached - ranked) / total).float() < mass
        else:
            forced = 0 if scores.forced is None else scores.forced.expand(ticks.shape).sum(-1, keepdim=True)
            rank = torch.arange(ticks.shape[-1], device=ticks.device)
            taken = ((reached / total).float() <= mass) | ((rank == forced) & (ranked > 0))
        keep = torch.empty_like(taken).scatter_(-1, order, taken)
        return BlockMask(((keep | always) | (mass >= 1)) & reachable, grid)


def _ticks(values: Tensor) -> Tensor:
    """Non-negative fp32 values as integers, 2^30 to the heaviest block of a row; NaN counts for nothing.

    The scale is a power of two, so this is exact up to one rounding, and a row's sum stays below 2^53.
    """
    values = values.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).clamp_min(0.0)
    exponent = torch.frexp(values.amax(-1, keepdim=True)).exponent
    return torch.ldexp(values.double(), 30 - exponent).round().long()

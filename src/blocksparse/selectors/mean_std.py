"""Keep every block whose logit lies some standard deviations above the row's mean (Sol-Attn, arXiv 2607.24027)."""

from __future__ import annotations

import math
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.per_head import PerHead, finite, over_blocks, per_head
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.scorers.block_scores import BlockLogits
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector

_LEAST_VARIANCE = 1e-6 * math.log(2) ** 2  # 1e-6 for logits in base 2, as in the authors' code


@final
@frozen(cache_hash=True)
class MeanStd(Selector[BlockLogits, BlockMask]):
    """Keep blocks whose logit is greater than `mean + tau * std` of their row, forced blocks, and the diagonal.

    Mean and standard deviation are over the blocks that a row may reach. The deviation is that of the logits
    themselves, or the estimate that the scorer gives with them (`BlockLogits.variance`). Nothing is sorted, and a
    row of equal logits keeps none of them: add a `Band`.

    Args:
        tau: how many standard deviations above the mean; any finite number, or one per query head.
    """

    tau: PerHead = field(default=1.0, converter=per_head, validator=finite)

    def __call__(self, scores: BlockLogits) -> BlockMask:
        grid, values, tau = scores.grid, scores.values, over_blocks(self.tau, scores.values)
        reachable = grid.reachable
        count = reachable.sum(-1, keepdim=True).clamp_min(1)
        mean = _sum(values, reachable) / count
        if scores.variance is None:
            variance = _sum((values - mean.to(values.dtype)).square(), reachable) / count
        else:
            variance = scores.variance.unsqueeze(-1).double()
        bound = mean + tau * (variance + _LEAST_VARIANCE).sqrt()
        keep = values > bound.to(values.dtype)
        keep = keep if scores.forced is None else keep | scores.forced
        return BlockMask(within_reach(keep, grid, diagonal=True), grid)

    def alignment(self, causal: bool) -> int:
        return 1


def _sum(x: Tensor, where: Tensor) -> Tensor:
    """The sum of each row over the blocks `where`, in float64, so that its order hardly matters."""
    total: Tensor = x.where(where, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return total

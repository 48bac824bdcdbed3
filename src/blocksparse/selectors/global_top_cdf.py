"""Keep the smallest set of blocks that holds a share of a whole head's mass (FlexPrefill, arXiv 2502.20766)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead, least, over_blocks, per_head, share
from blocksparse.checks.validators import flag
from blocksparse.kernels.common.below import Below
from blocksparse.kernels.selecting.global_top_cdf import global_top_cdf
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class GlobalTopCdf(Selector[BlockMass, BlockMask]):
    """Take the heaviest blocks of all rows of a head together, until `mass` of their total is reached.

    The whole head has one budget, so a row may keep much more or much less than the share `mass` of its total;
    `TopCdf` has a budget for each row. Earlier rows compete with later ones, so the choice is not causal and
    depends on how a prompt is chunked. Forced blocks are kept in any case, but are not counted first: they are
    ranked and counted like all others. The search on a GPU takes 5 bytes per block; the sort on other devices
    takes about 45.

    Args:
        mass: share of the head's total mass, in (0, 1]; a number, or one per query head. 1 keeps every
            reachable block.
        crossing: keep the block with which the sum reaches the target, as the paper's algorithm does; the released
            code drops it.
    """

    mass: PerHead = field(default=0.95, converter=per_head, validator=share)
    crossing: bool = field(default=True, kw_only=True, validator=flag)

    def __call__(self, scores: BlockMass) -> BlockMask:
        return self._chosen(scores, None)

    def in_heads(self, scores: BlockMass, heads: Below) -> BlockMask:
        return self._chosen(scores, heads)

    def _chosen(self, scores: BlockMass, heads: Below | None) -> BlockMask:
        mass = over_blocks(self.mass, scores.values)
        keep = global_top_cdf(scores.values, scores.forced, mass, scores.grid, crossing=self.crossing, heads=heads)
        return BlockMask(keep, scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1

    def alignment(self, causal: bool) -> int:
        raise ValueError("'GlobalTopCdf' has one budget for all rows of a call, and a part has some rows")

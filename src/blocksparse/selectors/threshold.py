"""Keep every block that is worth more than a fixed value (BFLA, section 3.2)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead, any_number, over_blocks, per_head, written
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class Threshold(Selector[BlockScores, BlockMask]):
    """Keep blocks whose score is greater than `value`, forced blocks, and the diagonal.

    Args:
        value: the threshold, in the units of the scores; a number, or one per query head.
    """

    value: PerHead = field(converter=per_head, validator=any_number, repr=written)

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        keep = scores.values > over_blocks(self.value, scores.values).float()
        keep = keep if scores.forced is None else keep | scores.forced
        return BlockMask(within_reach(keep, grid, diagonal=True), grid)

    def alignment(self, causal: bool) -> int:
        return 1

"""Keep the smallest set of blocks that holds a share of the row's mass (PBS-Attn algorithm 2, and others)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead, least, number_or_blocks, per_head, share
from blocksparse.checks.validators import flag
from blocksparse.kernels.positions.places import NOWHERE, Places
from blocksparse.kernels.selecting.top_cdf import top_cdf
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class TopCdf(Selector[BlockMass, BlockMask]):
    """Take forced blocks first, then the heaviest, until `mass` of the row's total is reached.

    Masses are rounded to integers before they are added, so the sums do not depend on the order of summation, and
    the same scores give the same mask on every device.

    Args:
        mass: share of the row's total mass, in (0, 1]; a number, or one per query head. 1 keeps every
            reachable block.
        crossing: keep the block with which the sum reaches the target (PBS-Attn algorithm 2, BFLA, XAttention).
            With `False` a block is taken only if the sum stays within the target, as in SpargeAttn, but the
            heaviest block that is not forced is kept in any case.
    """

    mass: PerHead = field(default=0.9, converter=per_head, validator=share)
    crossing: bool = field(default=True, validator=flag, kw_only=True)

    def __call__(self, scores: BlockMass) -> BlockMask:
        return self.with_places(scores, NOWHERE)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1

    def with_places(self, scores: BlockMass, places: Places) -> BlockMask:
        keep = top_cdf(
            scores.values,
            scores.forced,
            number_or_blocks(self.mass, scores.values),
            scores.grid,
            crossing=self.crossing,
            places=places,
        )
        return BlockMask(keep, scores.grid)

    def alignment(self, causal: bool) -> int:
        return 1

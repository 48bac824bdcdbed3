"""Keep every block that is worth a share of the row's best one (FlashPrefill, arXiv 2603.06199, section 3.4)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead, over_blocks, per_head, share
from blocksparse.kernels.selecting.peak_share import peak_share
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class PeakShare(Selector[BlockMass, BlockMask]):
    """Keep blocks with at least the share `alpha` of their row's greatest mass, forced blocks, and the diagonal.

    It takes neither a sort nor a running sum. A block without mass is not kept, even where no block of a row has
    any. How much of the row's mass is kept depends on how it is spread: of `n` equal blocks all are.

    Args:
        alpha: share of the row's greatest mass, in (0, 1]; a number, or one per query head. At 1 the best block
            is kept, and blocks that equal it.
    """

    alpha: PerHead = field(converter=per_head, validator=share)

    def __call__(self, scores: BlockMass) -> BlockMask:
        alpha = over_blocks(self.alpha, scores.values)
        return BlockMask(peak_share(scores.values, scores.forced, alpha, scores.grid), scores.grid)

    def alignment(self, causal: bool) -> int:
        return 1

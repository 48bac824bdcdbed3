"""A rule of position on smaller blocks than those of the scores (BFLA, section 3.3)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a, size, whole
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.selector import Selector


@final
@frozen(cache_hash=True)
class OnTiles(Selector[BlockScores, BlockMask]):
    """Keep what `rule` keeps on blocks `n` times smaller on both sides.

    It goes with a refined rule on scores, as in `Refined(a, n) | OnTiles(Band(256), n)`.
    """

    rule: PositionSelector = field(validator=a(PositionSelector))
    n: int = field(converter=whole, validator=size)

    def __call__(self, scores: BlockScores) -> BlockMask:
        return self.rule.on(scores.grid.refined(self.n))

    def added_to(self, first: Selector[BlockScores, BlockMask], scores: BlockScores) -> BlockMask:
        return self.rule.joined(first(scores), scores.grid.refined(self.n))

    def reads_beyond(self, tau: PerHead) -> bool:
        return False

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.rule.keeps_everything(M, N, causal=causal)

    def alignment(self, causal: bool) -> int:
        return self.rule.alignment(causal)

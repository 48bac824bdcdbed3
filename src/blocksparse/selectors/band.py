"""Keep what is near the query (BFLA, eq. 15)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen, validators

from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class Band(Selector[BlockScores, BlockMask]):
    """Keep every block with a key at most `tokens` away from some query of the row (BFLA, eq. 15).

    Distances are between original positions: backwards when causal, both ways otherwise. `w` whole blocks
    before the row's own are `Band(w * block)`.
    """

    tokens: int = field(validator=[validators.instance_of(int), validators.ge(0)])

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        keep = grid.within(self.tokens) | grid.diagonal
        return BlockMask(keep.expand(scores.values.shape), grid)

"""Keep the start of the prompt (BFLA, eq. 16; the attention sink)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen, validators

from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class Sink(Selector[BlockScores, BlockMask]):
    """Keep every block that holds one of the first `tokens` original positions (BFLA, eq. 16)."""

    tokens: int = field(default=1, validator=[validators.instance_of(int), validators.gt(0)])

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        keep = grid.holding_first(self.tokens) | grid.diagonal
        return BlockMask(keep.expand(scores.values.shape), grid)

"""Keep every reachable block: the dense limit."""

from __future__ import annotations

from typing import final

from attrs import frozen

from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class Everything(Selector[BlockScores, BlockMask]):
    """Keep every reachable block: full attention, whatever the scores."""

    def __call__(self, scores: BlockScores) -> BlockMask:
        return BlockMask(scores.grid.reachable.expand(scores.values.shape), scores.grid)

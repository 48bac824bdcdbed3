"""Keep the block that now holds token 0 (PBS-Attn's released code)."""

from __future__ import annotations

from typing import final

from attrs import frozen

from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class FirstToken(Selector[BlockScores, BlockMask]):
    """Keep the one block that holds original token 0, wherever the permuter put it.

    PBS-Attn's released code adds it after selection. `Sink(n)` keeps the blocks of the first `n` tokens.
    """

    def __call__(self, scores: BlockScores) -> BlockMask:
        grid = scores.grid
        keep = grid.holding_first(1) | grid.diagonal
        return BlockMask(keep.expand(scores.values.shape), grid)

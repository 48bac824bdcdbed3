"""Role: selectors that look at positions alone."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from operator import or_

from torch import Tensor

from blocksparse.geometry import Grid
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.places import NOWHERE, Places
from blocksparse.selectors.selector import Selector


class PositionSelector(Selector[BlockScores, BlockMask]):
    """Keeps blocks for where they lie, whatever their scores. `OnTiles` applies one to finer blocks."""

    @abstractmethod
    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`; the diagonal and reach are seen to."""

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        """The rule as places that a kernel works out by itself, and rules whose `where` it is given."""
        return NOWHERE, (self,)

    def __call__(self, scores: BlockScores) -> BlockMask:
        return BlockMask(self.on(scores.grid).expand(scores.values.shape), scores.grid)

    def on(self, grid: Grid) -> Tensor:
        """What the mask on `grid` keeps: `where`, and the diagonal, as far as they are reachable.

        `[B|1, H|1, rows, cols]`; one entry serves all batch entries, or heads, that do not differ.
        """
        places, others = self.parts()
        keep = reduce(or_, (rule.where(grid) for rule in others)) if others else None
        return within_reach(keep, grid, **places._asdict(), diagonal=True)

"""Role: selectors that look at positions alone, and their union."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final, overload

from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.alignment import of_parts
from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.geometry import Grid
from blocksparse.kernels.positions.places import NOWHERE, Places
from blocksparse.kernels.positions.within_reach import within_reach
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import ScoresT, Selector, Union


class PositionSelector(Selector[BlockScores, BlockMask]):
    """Keeps blocks by position, whatever their scores. `OnTiles` applies one to finer blocks.

    `a | b` of two position selectors is a position selector and needs one launch. A custom rule defines `where`
    only, because unions call nothing else.

    Raises:
        TypeError: a subclass defines `__call__`, `on`, `joined` or `added_to`.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if own := {"__call__", "on", "joined", "added_to"} & set(vars(cls)):
            raise TypeError(
                f"{cls.__name__} has its own {', '.join(sorted(own))}, which unions would not call: a "
                "PositionSelector defines only 'where'; make it a Selector"
            )

    @abstractmethod
    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`; the diagonal and reach are seen to."""

    def reads_beyond(self, tau: PerHead) -> bool:
        return False

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        """The rule as places that a kernel works out by itself, and rules whose `where` it is given."""
        return NOWHERE, (self,)

    @overload
    def __or__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __or__(self, other: Selector[ScoresT, BlockMask]) -> Selector[ScoresT, BlockMask]: ...
    def __or__(self, other: Any) -> Any:
        """Keep what either keeps. A choice by scores goes first, so that the rule can join its mask."""
        if isinstance(other, PositionSelector):
            return PositionUnion(self, other)
        return Union(other, self) if isinstance(other, Selector) else NotImplemented

    @overload
    def __ror__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __ror__(self, other: Selector[ScoresT, BlockMask]) -> Selector[ScoresT, BlockMask]: ...
    def __ror__(self, other: Any) -> Any:
        return PositionUnion(other, self) if isinstance(other, PositionSelector) else super().__ror__(other)

    def __call__(self, scores: BlockScores) -> BlockMask:
        return self.on(scores.grid)

    def added_to(self, first: Selector[BlockScores, BlockMask], scores: BlockScores) -> BlockMask:
        places, others = self.parts()
        mask = None if others else first.with_places(scores, places)
        return self.joined(first(scores), scores.grid) if mask is None else mask

    def on(self, grid: Grid) -> BlockMask:
        """The mask on `grid`: `where`, and the diagonal, as far as they are reachable."""
        keep = self._within_reach(None, grid)
        return BlockMask(keep.expand(grid.batch, grid.q_heads, grid.rows, grid.cols), grid)

    def joined(self, mask: BlockMask, grid: Grid) -> BlockMask:
        """`mask`, which lies on the blocks of `grid`, with what the rule keeps on them, in one launch.

        Where query heads share `mask`, they share what the rule keeps for any of them.
        """
        shared = mask.keep.shape[1] != grid.q_heads
        if not mask.grid.same_blocks(grid) or (shared and (self.parts()[1] or grid.shared() is not grid)):
            # The rule may keep other blocks in another head of a group.
            mine = self.on(grid)
            return mask | (mine.share_heads() if shared else mine)
        return BlockMask(self._within_reach(mask.keep, mask.grid).expand(mask.keep.shape), mask.grid)

    def _within_reach(self, keep: Tensor | None, grid: Grid) -> Tensor:
        """`[B|1, H|1, rows, cols]`; one entry serves all batch entries, or heads, that do not differ."""
        places, others = self.parts()
        for rule in others:
            more = rule.where(grid)
            keep = more if keep is None else keep | more
        return within_reach(keep, grid, places=places, diagonal=True)


@final
@frozen(repr=False, cache_hash=True)
class PositionUnion(PositionSelector):
    """Keep what either rule of position keeps; written `a | b`."""

    first: PositionSelector = field(validator=a(PositionSelector))
    second: PositionSelector = field(validator=a(PositionSelector))

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def where(self, grid: Grid) -> Tensor:
        return self.first.where(grid) | self.second.where(grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        if any(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second)):
            return True
        places, _ = self.parts()
        # The last query is `N - 1 - first` tokens away from the first key that is not among the `first` ones.
        return causal and places.near is not None and (places.first or 0) + places.near >= N - 1

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        (mine, rest), (its, others) = self.first.parts(), self.second.parts()
        both = mine.joined(its)
        return (mine, (*rest, self.second)) if both is None else (both, (*rest, *others))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)

"""The role of a selector: BlockScores -> BlockMask; rules of position; `a | b` and `a & b` of two selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, final, overload

from attrs import field, frozen
from torch import Tensor

from blocksparse.check.stage import Stage, of_parts, parts_of
from blocksparse.check.validators import a
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.score.scorer import BlockScores
from blocksparse.select.block_mask import BlockMask

ScoresT = TypeVar("ScoresT", bound=BlockScores)
ScoresT_contra = TypeVar("ScoresT_contra", bound=BlockScores, contravariant=True)
MaskT_co = TypeVar("MaskT_co", bound=BlockMask, covariant=True)


@final
@frozen
class SelectorTraits:
    """What a selector can do besides selecting. With the defaults it is right, and only slower.

    Args:
        heads: its `__call__` takes `heads` too, a `HeadMask`: the heads that need a mask. Entries of others may be
            anything.
        always: it takes `always` too. `AlwaysKept` are further blocks to keep for their position.
        mask: it takes `mask` too. A `BlockMask` has further blocks to keep, those of another selector.
        reads_values: it reads `scores.values` itself. False promises that it does so at most through the selectors
            in its fields. A scorer may then leave out values of heads.
    """

    heads: bool = False
    always: bool = False
    mask: bool = False
    reads_values: bool = True


class Selector(Stage, ABC, Generic[ScoresT_contra, MaskT_co]):
    """Role: selects the blocks to keep.

    A selector must keep `grid.diagonal`, so that no causal query is left without a key, and may keep only
    `grid.visible` blocks. One that reads values also keeps `scores.forced`, if that is not None. Ties go to the
    lower column.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits()

    @abstractmethod
    def __call__(self, scores: ScoresT_contra) -> MaskT_co:
        """Choose among the blocks of `scores.grid`."""

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        """Whether every call of `M` queries and `N` keys keeps all visible blocks.

        A pipeline whose executor may attend densely then does so without scoring a block. False means unknown.
        """
        return False

    @property
    def prompt_tail(self) -> int | None:
        """Number of tokens at the end of a prompt that it treats apart; None if every value of `remaining` counts.

        A selector that wraps or joins others has the greatest number of theirs.
        """
        tails = [part.prompt_tail for part in parts_of(self, Selector)]
        return None if None in tails else max(tails, default=0)

    def __or__(self: Masking[ScoresT], other: Masking[ScoresT]) -> Masking[ScoresT]:
        """Keep what either keeps."""
        return Union(self, other) if isinstance(other, Selector) else NotImplemented

    def __ror__(self: Masking[ScoresT], other: Masking[ScoresT]) -> Masking[ScoresT]:
        """Keep what either keeps. Thanks to this method a type checker sees a stronger need right of `|`, too."""
        return Union(other, self) if isinstance(other, Selector) else NotImplemented

    def __and__(self: Masking[ScoresT], other: Masking[ScoresT]) -> Masking[ScoresT]:
        """Keep what both keep."""
        return Intersection(self, other) if isinstance(other, Selector) else NotImplemented

    def __rand__(self: Masking[ScoresT], other: Masking[ScoresT]) -> Masking[ScoresT]:
        """Keep what both keep. Thanks to this method a type checker sees a stronger need right of `&`, too."""
        return Intersection(other, self) if isinstance(other, Selector) else NotImplemented


Masking = Selector[ScoresT, BlockMask]
"""A selector whose mask has no ranks."""


class Combination(Selector[ScoresT_contra, MaskT_co]):
    """A selector that is made of those in its fields and looks at no score itself.

    Unless it overrides `keeps_everything`, it keeps at least what each of them keeps.
    """

    traits = SelectorTraits(reads_values=False)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return any(part.keeps_everything(M, N, causal=causal) for part in parts_of(self, Selector))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, *parts_of(self, Selector))


def select(selector: Any, scores: BlockScores, **more: Any) -> BlockMask:
    """The mask of a selector that gets those of `more` that it takes and that are not None."""
    takes = {name: x for name, x in more.items() if x is not None and getattr(selector.traits, name)}
    mask: BlockMask = selector(scores, **takes)
    return mask


@final
@frozen(repr=False, cache_hash=True)
class Union(Combination[ScoresT_contra, BlockMask]):
    """Keep what either part keeps; written `a | b`."""

    first: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    traits = SelectorTraits(heads=True, reads_values=False)

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def __call__(self, scores: ScoresT_contra, *, heads: Heads = None) -> BlockMask:
        first, second = self.first, self.second
        if isinstance(second, PositionSelector) and first.traits.always:
            always, others = second.parts()
            if not others:
                return select(first, scores, heads=heads, always=always)
        mask = select(first, scores, heads=heads)
        if second.traits.mask:
            return select(second, scores, heads=heads, mask=mask)
        return mask | select(second, scores, heads=heads)


@final
@frozen(repr=False, cache_hash=True)
class Intersection(Combination[ScoresT_contra, BlockMask]):
    """Keep what both parts keep; written `a & b`."""

    first: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.first(scores) & self.second(scores)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return all(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second))


class PositionSelector(Selector[BlockScores, BlockMask]):
    """Keeps blocks by position, whatever their scores. `OnTiles` applies one to finer blocks.

    `a | b` of two position selectors is a position selector and needs one launch. A custom rule defines `where`
    only, because unions call nothing else.

    Raises:
        TypeError: a subclass defines `__call__`, `on` or `joined`.
    """

    traits = SelectorTraits(mask=True, reads_values=False)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if own := {"__call__", "on", "joined"} & set(vars(cls)):
            raise TypeError(
                f"{cls.__name__} has its own {', '.join(sorted(own))}, which unions would not call: a "
                "PositionSelector defines only 'where'. Make it a Selector."
            )

    @abstractmethod
    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`; callers apply diagonal and causality."""

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        """The rule as blocks that a kernel keeps always, and rules of which it gets `where`."""
        return NO_BLOCKS, (self,)

    @overload
    def __or__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __or__(self, other: Masking[ScoresT]) -> Masking[ScoresT]: ...
    def __or__(self, other: Any) -> Any:
        """Keep what either keeps. A choice by scores goes first, so that the rule can join its mask."""
        if isinstance(other, PositionSelector):
            return PositionUnion(self, other)
        return Union(other, self) if isinstance(other, Selector) else NotImplemented

    @overload
    def __ror__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __ror__(self, other: Masking[ScoresT]) -> Masking[ScoresT]: ...
    def __ror__(self, other: Any) -> Any:
        return PositionUnion(other, self) if isinstance(other, PositionSelector) else super().__ror__(other)

    def __call__(self, scores: BlockScores, *, mask: BlockMask | None = None) -> BlockMask:
        return self.on(scores.grid) if mask is None else self.joined(mask, scores.grid)

    def on(self, grid: Grid) -> BlockMask:
        """The mask on `grid`: `where`, and the diagonal, as far as they are visible."""
        keep = self._keep_visible(None, grid)
        return BlockMask(keep.expand(grid.batch, grid.q_heads, grid.rows, grid.cols), grid)

    def joined(self, mask: BlockMask, grid: Grid) -> BlockMask:
        """Union of `mask`, which lies on the blocks of `grid`, and the blocks of the rule, in one launch.

        Where query heads share `mask`, they share what the rule keeps for any of them.
        """
        shared = mask.keep.shape[1] != grid.q_heads
        if not mask.grid.same_blocks(grid) or (shared and (self.parts()[1] or grid.shared() is not grid)):
            # The rule may keep other blocks in another head of a group.
            mine = self.on(grid)
            return mask | (mine.share_heads() if shared else mine)
        return BlockMask(self._keep_visible(mask.keep, mask.grid).expand(mask.keep.shape), mask.grid)

    def _keep_visible(self, keep: Tensor | None, grid: Grid) -> Tensor:
        """`[B|1, H|1, rows, cols]`; one entry serves all batch entries, or heads, that do not differ."""
        always, others = self.parts()
        for rule in others:
            more = rule.where(grid)
            keep = more if keep is None else keep | more
        return keep_visible(keep, grid, always=always, diagonal=True)


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
        always, _ = self.parts()
        # The last query is `N - 1 - first` tokens away from the first key that is not among the `first` ones.
        return causal and always.near is not None and (always.first or 0) + always.near >= N - 1

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        (mine, rest), (its, others) = self.first.parts(), self.second.parts()
        both = mine.joined(its)
        return (mine, (*rest, self.second)) if both is None else (both, (*rest, *others))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)

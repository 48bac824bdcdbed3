"""The role of a selector: BlockScores -> BlockMask; and `a | b` and `a & b` of two selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar, final

from attrs import field, fields, frozen, has

from blocksparse.check.class_line import Stage, of_parts
from blocksparse.check.per_head import PerHead
from blocksparse.check.validators import a
from blocksparse.kernels.common.sizes import Below
from blocksparse.kernels.masks.grid import Places
from blocksparse.score.scorer import BlockScores
from blocksparse.select.block_mask import BlockMask

ScoresT = TypeVar("ScoresT", bound=BlockScores)
ScoresT_contra = TypeVar("ScoresT_contra", bound=BlockScores, contravariant=True)
MaskT_co = TypeVar("MaskT_co", bound=BlockMask, covariant=True)


class Selector(Stage, ABC, Generic[ScoresT_contra, MaskT_co]):
    """Role: selects the blocks to keep.

    A selector must keep `grid.diagonal`, so that no causal query is left without a key, and may keep only
    `grid.reachable` blocks. Ties go to the lower column.
    """

    @abstractmethod
    def __call__(self, scores: ScoresT_contra) -> MaskT_co:
        """Choose among the blocks of `scores.grid`."""

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        """Whether every call of `M` queries and `N` keys keeps all reachable blocks.

        A pipeline whose executor may attend densely then does so without scoring a block. False means unknown.
        """
        return False

    @property
    def prompt_tail(self) -> int | None:
        """Number of tokens at the end of a prompt that it treats apart; None if every value of `remaining` counts.

        A selector that wraps or joins others has the greatest number of theirs.
        """
        kind: Any = type(self)  # a dataclass perhaps, which joins none of ours
        parts = [getattr(self, each.name) for each in fields(kind)] if has(kind) else []
        tails = [part.prompt_tail for part in parts if isinstance(part, Selector)]
        return None if None in tails else max([tail for tail in tails if tail is not None], default=0)

    def reads_beyond(self, tau: PerHead) -> bool:
        """Whether it reads scores of heads whose divergence is not below `tau`; some scorers give none."""
        return True

    def __or__(
        self: Selector[ScoresT, BlockMask], other: Selector[ScoresT, BlockMask]
    ) -> Selector[ScoresT, BlockMask]:
        """Keep what either keeps."""
        return Union(self, other) if isinstance(other, Selector) else NotImplemented

    def __ror__(
        self: Selector[ScoresT, BlockMask], other: Selector[ScoresT, BlockMask]
    ) -> Selector[ScoresT, BlockMask]:
        """Keep what either keeps. Thanks to this method a type checker sees a stronger need right of `|`, too."""
        return Union(other, self) if isinstance(other, Selector) else NotImplemented

    def __and__(
        self: Selector[ScoresT, BlockMask], other: Selector[ScoresT, BlockMask]
    ) -> Selector[ScoresT, BlockMask]:
        """Keep what both keep."""
        return Intersection(self, other) if isinstance(other, Selector) else NotImplemented

    def __rand__(
        self: Selector[ScoresT, BlockMask], other: Selector[ScoresT, BlockMask]
    ) -> Selector[ScoresT, BlockMask]:
        """Keep what both keep. Thanks to this method a type checker sees a stronger need right of `&`, too."""
        return Intersection(other, self) if isinstance(other, Selector) else NotImplemented

    def added_to(self, first: Selector[ScoresT_contra, BlockMask], scores: ScoresT_contra) -> BlockMask:
        """Union of `first` and this selector by the same scores: `a | b` is `b.added_to(a, scores)`."""
        return first(scores) | self(scores)

    def in_heads(self, scores: ScoresT_contra, heads: Below) -> BlockMask:
        """Mask of the heads that need a result; the entries of other heads are undefined."""
        return self(scores)

    def with_places(self, scores: ScoresT_contra, places: Places) -> BlockMask | None:
        """Union of this selection and `places` in one launch; None if no kernel does both."""
        return None


@final
@frozen(repr=False, cache_hash=True)
class Union(Selector[ScoresT_contra, BlockMask]):
    """Keep what either part keeps; written `a | b`."""

    first: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.second.added_to(self.first, scores)

    def in_heads(self, scores: ScoresT_contra, heads: Below) -> BlockMask:
        return self.second.added_to(InHeads(self.first, heads), scores)

    def reads_beyond(self, tau: PerHead) -> bool:
        return any(part.reads_beyond(tau) for part in (self.first, self.second))

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return any(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)


@final
@frozen(eq=False)
class InHeads(Selector[ScoresT_contra, BlockMask]):
    """A part of a union in which only some heads need a result, as in the union."""

    rule: Selector[ScoresT_contra, BlockMask]
    heads: Below

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.rule.in_heads(scores, self.heads)

    def alignment(self, causal: bool) -> int:
        return self.rule.alignment(causal)


@final
@frozen(repr=False, cache_hash=True)
class Intersection(Selector[ScoresT_contra, BlockMask]):
    """Keep what both parts keep; written `a & b`."""

    first: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.first(scores) & self.second(scores)

    def reads_beyond(self, tau: PerHead) -> bool:
        return any(part.reads_beyond(tau) for part in (self.first, self.second))

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return all(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)

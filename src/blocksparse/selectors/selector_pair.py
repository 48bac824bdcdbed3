"""The union of two selections, each by separate scores (Prism, arXiv 2602.08426)."""

from __future__ import annotations

from typing import Generic, TypeVar, final

from attrs import field, frozen

from blocksparse.checks.alignment import of_parts
from blocksparse.checks.class_line import check_got
from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.scorer_pair import ScoresPair
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector

FirstT_contra = TypeVar("FirstT_contra", bound=BlockScores)
SecondT_contra = TypeVar("SecondT_contra", bound=BlockScores)


@final
@frozen(cache_hash=True)
class SelectorPair(
    Selector[ScoresPair[FirstT_contra, SecondT_contra], BlockMask], Generic[FirstT_contra, SecondT_contra]
):
    """Keep what `first` keeps by the first scores of a `ScorerPair`, and what `second` keeps by the second.

    `a | b` joins two selectors of the same scores; this joins two with a score each.

    Raises:
        TypeError: in a call, if a selector needs other scores than there are in its place.
    """

    first: Selector[FirstT_contra, BlockMask] = field(validator=a(Selector))
    second: Selector[SecondT_contra, BlockMask] = field(validator=a(Selector))

    def __call__(self, scores: ScoresPair[FirstT_contra, SecondT_contra]) -> BlockMask:
        check_got(self.first, Selector, 0, scores.first)
        check_got(self.second, Selector, 0, scores.second)
        return self.first(scores.first) | self.second(scores.second)

    def reads_beyond(self, tau: PerHead) -> bool:
        return any(part.reads_beyond(tau) for part in (self.first, self.second))

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return any(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)

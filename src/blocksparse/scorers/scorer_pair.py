"""Two scorers side by side, for a choice by either (Prism, arXiv 2602.08426)."""

from __future__ import annotations

from typing import Generic, TypeVar, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.alignment import of_parts
from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import PermutationT_contra, Scorer

FirstT_co = TypeVar("FirstT_co", bound=BlockScores, covariant=True)
SecondT_co = TypeVar("SecondT_co", bound=BlockScores, covariant=True)


@final
@frozen(eq=False)
class ScoresPair(BlockScores, Generic[FirstT_co, SecondT_co]):
    """The scores of two scorers of the same blocks; read as one, they are the first scorer's."""

    first: FirstT_co = field(kw_only=True)
    second: SecondT_co = field(kw_only=True)


@final
@frozen(cache_hash=True)
class ScorerPair(
    Scorer[PermutationT_contra, ScoresPair[FirstT_co, SecondT_co]],
    Generic[PermutationT_contra, FirstT_co, SecondT_co],
):
    """Score by `first` and by `second`, which cut the call into the same blocks; `SelectorPair` chooses by both.

    Raises:
        ValueError: in a call, if the scorers cut it into different blocks.
    """

    first: Scorer[PermutationT_contra, FirstT_co] = field(validator=a(Scorer))
    second: Scorer[PermutationT_contra, SecondT_co] = field(validator=a(Scorer))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> ScoresPair[FirstT_co, SecondT_co]:
        first = self.first(q, k, permutation, spec, history)
        second = self.second(q, k, permutation, spec, history)
        if not first.grid.same_blocks(second.grid):
            mine, its = ((grid.q_block, grid.k_block) for grid in (first.grid, second.grid))
            raise ValueError(f"both scorers of 'ScorerPair' must score the same blocks: {mine} and {its}")
        return ScoresPair(first.values, first.grid, first.forced, first=first, second=second)

    @property
    def keeps_history(self) -> bool:
        return self.first.keeps_history and self.second.keeps_history

    @property
    def values_below(self) -> PerHead | None:
        mine, its = self.first.values_below, self.second.values_below
        return its if mine is None else mine

    @property
    def takes_paged_keys(self) -> bool:
        # Of two scorers of which one remembers nothing, neither is given a history.
        alike = self.first.keeps_history == self.second.keeps_history
        return alike and self.first.takes_paged_keys and self.second.takes_paged_keys

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)

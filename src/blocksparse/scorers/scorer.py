"""The role of a scorer: q, k, Permutation -> BlockScores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.alignment import unknown
from blocksparse.checks.per_head import PerHead
from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.key_history import KeyHistory

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
ScoresT_co = TypeVar("ScoresT_co", bound=BlockScores, covariant=True)


class Scorer(ABC, Generic[PermutationT_contra, ScoresT_co]):
    """Says how much each block, the pairs of one row of queries and one column of keys, is worth.

    It makes the grid, which defines the pairs that may be attended to at all: those that causality and a sliding
    window leave. Selectors, executors and traces take both from the grid.
    """

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> ScoresT_co:
        """Score `q` `[B, Hq, M, D]` against `k` `[B, Hkv, N, D]`, both in original order.

        Args:
            history: what was found of the first keys in earlier calls, and learns of the others. The scores are
                the same without, to the bit. A scorer that keeps none ignores it.

        Raises:
            ValueError: the history is of other keys, or `permutation` moves keys.
        """

    @property
    def keeps_history(self) -> bool:
        """Whether this scorer reuses results of earlier keys."""
        return False

    @property
    def values_below(self) -> PerHead | None:
        """The divergence below which a head has values, of a scorer that leaves heads out; None: all have."""
        return None

    @property
    def takes_paged_keys(self) -> bool:
        """Whether this scorer, given a history, reads keys through `history.blocks` only.

        It then scores keys in the pages of a cache as well: `k` is then no more than a shape.
        """
        return False

    def alignment(self, causal: bool) -> int:
        """By how many tokens the queries of a call may be cut, for each part to choose as the whole call does.

        A part of a causal call has the keys up to its own end, and is told how much `remaining` follows; a part of
        another call has all keys. Schemes of `distributed` cut calls so.

        Raises:
            ValueError: a part may choose otherwise, and why; as of every stage that does not say.
        """
        raise unknown(self)

"""The role of a scorer: q, k, Permutation -> BlockScores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

from torch import Tensor

from blocksparse.inputs import UnsupportedError
from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.key_history import KeyHistory

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
ScoresT_co = TypeVar("ScoresT_co", bound=BlockScores, covariant=True)


class Scorer(ABC, Generic[PermutationT_contra, ScoresT_co]):
    """Says how much each block, the pairs of one row of queries and one column of keys, is worth.

    It makes the grid, and so it says which pairs may be attended to at all: those that causality and a sliding
    window leave. Selectors, executors and traces take both from the grid.
    """

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most, its own included; None for all tokens up to its own."""
        return None

    def in_window(self, window: int | None) -> Self:
        """This scorer for a layer with a sliding window: a query at `p` sees the keys at `p - window < k <= p`.

        It then cuts its grid with the window, `Grid.of(..., window=self.window)`, and counts what is seen alone.
        None is this scorer without a window.

        Raises:
            TypeError, ValueError: `window` is not a whole number, at least 1.
            UnsupportedError: the scorer has no field for it.
        """
        if window is None and self.window is None:
            return self
        because = f"{type(self).__name__} knows no sliding window"
        raise UnsupportedError(
            f"{because}: give it a field 'window', Grid.of(..., window=self.window), and a method 'in_window'",
            because,
        )

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, permutation: PermutationT_contra, *, causal: bool, scale: float
    ) -> ScoresT_co:
        """Score `q` `[B, Hq, M, D]` against `k` `[B, Hkv, N, D]`, both in original order."""

    @property
    def keeps_history(self) -> bool:
        """Whether `with_history` is there: whether this scorer remembers anything of keys that it has seen."""
        return False

    def with_history(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        history: KeyHistory,
        *,
        causal: bool,
        scale: float,
    ) -> ScoresT_co:
        """Give the scores of a call, to the bit, from what `history` knows of `k`, and tell it what is new.

        Raises:
            UnsupportedError: the scorer keeps none.
            ValueError: the history is of other keys, or `permutation` moves keys.
        """
        because = f"{type(self).__name__} remembers nothing of keys"
        raise UnsupportedError(f"{because}: call without 'history', which would save nothing", because)

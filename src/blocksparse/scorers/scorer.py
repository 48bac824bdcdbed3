"""The role of a scorer: q, k, Permutation -> BlockScores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.permuters.permutation import Permutation
from blocksparse.scorers.block_scores import BlockScores

PermutationT_contra = TypeVar("PermutationT_contra", bound=Permutation, contravariant=True)
ScoresT_co = TypeVar("ScoresT_co", bound=BlockScores, covariant=True)


class Scorer(ABC, Generic[PermutationT_contra, ScoresT_co]):
    """Says how much each block, the pairs of one row of queries and one column of keys, is worth."""

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, permutation: PermutationT_contra, *, causal: bool, scale: float
    ) -> ScoresT_co:
        """Score `q` `[B, Hq, M, D]` against `k` `[B, Hkv, N, D]`, both in original order."""

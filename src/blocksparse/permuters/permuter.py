"""The role of a permuter: q, k -> Permutation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.permuters.permutation import Permutation

PermutationT_co = TypeVar("PermutationT_co", bound=Permutation, covariant=True)


class Permuter(ABC, Generic[PermutationT_co]):
    """Decides the order of the tokens. It gives an index map and moves no token."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> PermutationT_co:
        """Order `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`; if causal, query `i` has position `N - M + i`."""

    @property
    def moves_keys(self) -> bool:
        """Whether keys may move to other slots. False promises that `k_index` is None."""
        return True

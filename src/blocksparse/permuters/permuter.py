"""The role of a permuter: q, k -> Permutation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.alignment import unknown
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

    def alignment(self, causal: bool) -> int:
        """By how many tokens the queries of a call may be cut, for each part to choose as the whole call does.

        A part of a causal call has the keys up to its own end, and is told how much `remaining` follows; a part of
        another call has all keys. Schemes of `distributed` cut calls so.

        Raises:
            ValueError: a part may choose otherwise, and why; as of every stage that does not say.
        """
        raise unknown(self)

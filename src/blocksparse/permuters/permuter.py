"""Role: q, k -> Permutation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from blocksparse.permuters.permutation import Permutation

PermutationT_co = TypeVar("PermutationT_co", bound=Permutation, covariant=True)


class Permuter(ABC, Generic[PermutationT_co]):
    """Decides in which order tokens stand. Gives an index map; moves nothing."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, *, causal: bool, scale: float) -> PermutationT_co:
        """Order `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`; query `i` stands at position `N - M + i`."""

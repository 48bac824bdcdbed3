"""Leave every token where it is."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter


@final
@frozen(cache_hash=True)
class Identity(Permuter[GlobalPermutation]):
    """Leave every token where it is. Costs nothing: no index map is made."""

    moves_keys = False

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        return GlobalPermutation()

    def alignment(self, causal: bool) -> int:
        return 1

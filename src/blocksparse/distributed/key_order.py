"""The order of all keys, for stages that see only a part of the queries."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, final

from attrs import evolve, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.distributed.call import Call
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.permuters.segment_key_sort import SegmentKeySort
from blocksparse.permuters.segment_query_sort import SegmentQuerySort


@singledispatch
def probed(permuter: object) -> int:
    """How many of the last queries of the whole call order its keys."""
    del permuter
    return 0


@probed.register
def _(permuter: SegmentKeySort) -> int:
    return permuter.probe


@probed.register
def _(permuter: SegmentQuerySort) -> int:
    return probed(permuter.keys)


@singledispatch
def for_chunks(permuter: Permuter[Any], probe: Tensor | None, k: Tensor, call: Call) -> Permuter[Any]:
    """A permuter that orders a chunk's tokens as `permuter` orders them in the whole call.

    Args:
        probe: the last queries of the whole call, `[B, Hq, probed(permuter), D]` or all if there are fewer.
        k: the keys of the whole call, `[B, Hkv, N, D]`.
    """
    del probe, k, call
    return permuter


@for_chunks.register
def _(permuter: SegmentKeySort, probe: Tensor, k: Tensor, call: Call) -> Permuter[Any]:
    return _Cut(permuter(probe, k, call.spec))


@for_chunks.register
def _(permuter: SegmentQuerySort, probe: Tensor | None, k: Tensor, call: Call) -> Permuter[Any]:
    return evolve(permuter, keys=for_chunks(permuter.keys, probe, k, call))


@final
@frozen(eq=False)
class _Cut(Permuter[GlobalPermutation]):
    """The first keys of an order inside segments."""

    whole: GlobalPermutation

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        index = self.whole.k_index
        return evolve(self.whole, k_index=None if index is None else index[..., : k.shape[2]])

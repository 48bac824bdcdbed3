"""The order of all keys, for stages that see only a part of the queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, final

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.distributed.call import Call
from blocksparse.distributed.pieces import Piece
from blocksparse.distributed.ranks import Ranks
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.order.segment_sort import SegmentKeySort, SegmentQuerySort
from blocksparse.spec import AttentionSpec


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


def last_queries(q: Tensor, pieces: Sequence[Sequence[Piece]], count: int, ranks: Ranks) -> Tensor | None:
    """The `count` last queries of all ranks, `[B, Hq, count, D]`, or all if there are fewer; None for 0.

    Args:
        q: the queries of this rank, `[B, Hq, M, D]`, one piece behind the other.
        pieces: those of each rank.
    """
    if not count:
        return None
    end = max(piece.end for its in pieces for piece in its)
    found = []
    for piece, rank in sorted((piece, rank) for rank, its in enumerate(pieces) for piece in its):
        first = max(piece.start, end - count)
        if first >= piece.end:
            continue
        if rank == ranks.rank:
            skipped = sum(other.length for other in pieces[rank][: pieces[rank].index(piece)])
            start = skipped + first - piece.start
            part = q[:, :, start : start + piece.end - first].contiguous()
        else:
            part = q.new_empty((*q.shape[:2], piece.end - first, q.shape[3]))
        found.append(ranks.from_rank(part, rank))
    return torch.cat(found, dim=2)


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

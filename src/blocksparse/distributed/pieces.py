"""The tokens that each rank has, the pairs of two pieces as rectangles of blocks, and the order of all keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import singledispatch
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.distributed.ranks import Ranks, ShardedCall
from blocksparse.grid import Grid
from blocksparse.order.content_orders import SegmentKeySort, SegmentQuerySort
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


class Piece(NamedTuple):
    """Consecutive tokens, from position `start` up to, but not including, position `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    def within(self, other: Piece) -> slice:
        """Where these tokens stand in a larger piece."""
        return slice(self.start - other.start, self.end - other.start)


def in_order(lengths: Sequence[int], before: int) -> list[list[Piece]]:
    """The pieces of each rank: rank `r` has the next `lengths[r]` tokens, the first rank those after `before`."""
    return [[Piece(before + end - n, before + end)] for n, end in zip(lengths, accumulate(lengths), strict=True)]


def head_tail(lengths: Sequence[int], before: int, cut: int) -> list[list[Piece]]:
    """The pieces of each of `n` ranks where rank `r` has pieces `r` and `2 n - 1 - r` of `2 n`.

    Late queries see more keys, so that in a causal call each rank then has much the same work. Pieces end at
    multiples of one length, which is a multiple of `cut`; thus the first and the last may be shorter.
    """
    n, (first, *others) = len(lengths), lengths
    if n == 1:
        return in_order(lengths, before)
    length, lead = others[0] // 2, before % cut
    last = first + lead - length
    if any(other != 2 * length for other in others) or not 0 < last <= length:
        raise ValueError(
            "head-tail shards must be pieces of one length, but for the outer two: the ranks have "
            f"{', '.join(map(str, lengths))} tokens. Cut them with shard()."
        )
    bounds = [before, *(before - lead + length * i for i in range(1, 2 * n)), before + sum(lengths)]
    each = [Piece(*bound) for bound in pairwise(bounds)]
    return [[each[rank], each[-1 - rank]] for rank in range(n)]


def cut(tokens: int, ranks: int, before: int, at: int, *, both_ends: bool) -> list[list[Piece]]:
    """Cut `tokens` after `before` others at multiples of `at`: a piece for each rank, or two as in `head_tail`."""
    count, origin = ranks, before // at * at
    blocks = -(-(before + tokens - origin) // at)
    inner = [blocks * i // count for i in range(1, count)]
    if both_ends and ranks > 1:
        count = 2 * ranks
        inner = [-(-blocks // count) * i for i in range(1, count)]
    bounds = [before, *(origin + at * i for i in inner), before + tokens]
    each = [Piece(*bound) for bound in pairwise(bounds)]
    if any(piece.length < 1 for piece in each):
        raise ValueError(
            f"{tokens} tokens are too few for {count} pieces over {ranks} ranks: pieces begin at multiples of "
            f"{at} tokens, by which this pipeline chooses blocks. "
            f"Use fewer ranks{' or leave out head_tail' if count > ranks else ''}."
        )
    return [[each[rank], each[-1 - rank]] if count > ranks else [each[rank]] for rank in range(ranks)]


def taken(x: Tensor, pieces: Sequence[Piece], dim: int, *, before: int = 0) -> list[Tensor]:
    """The tokens of `x` along `dim` that stand in each piece; the first token of `x` stands at `before`."""
    return [x.narrow(dim, piece.start - before, piece.length) for piece in pieces]


def split(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """`x` `[B, H, N, ...]`, in which these pieces stand one behind the other, cut into them."""
    return list(x.split([piece.length for piece in pieces], dim=2))


def joined(parts: Callable[[], list[Tensor]], pieces: Sequence[Sequence[Piece]]) -> Callable[[], Tensor]:
    """A function that waits for the shards of all ranks, and returns their pieces in order, `[B, H, N, D]`."""
    waiting, found = [parts], list[Tensor]()

    def join() -> Tensor:
        if waiting:  # after the first call, nothing holds the shards any more
            each: dict[Piece, Tensor] = {}
            for its, part in zip(pieces, waiting.pop()(), strict=True):
                each.update(zip(its, split(part, its), strict=True))
            found.append(torch.cat([each[piece] for piece in sorted(each)], dim=2))
        return found[0]

    return join


def refuse_cuts(pieces: Sequence[Sequence[Piece]], at: int, what: str) -> None:
    """Refuse pieces that begin inside a block, except for the first of all."""
    starts = sorted(piece.start for its in pieces for piece in its)[1:]
    if wrong := [start for start in starts if start % at]:
        raise ValueError(
            f"shards of {what} must begin at multiples of {at} tokens, by which this pipeline chooses blocks, as "
            f"shard() cuts them: one begins at position {wrong[0]}"
        )


class Region(NamedTuple):
    """Queries and keys, either all keys before all queries, or the same tokens and causal."""

    queries: Piece
    keys: Piece
    causal: bool


def regions(queries: Piece, keys: Piece, *, causal: bool) -> Iterator[Region]:
    """The regions that cover all pairs which queries may see, each pair once."""
    if not causal or keys.end <= queries.start:
        yield Region(queries, keys, False)
        return
    own = Piece(max(queries.start, keys.start), min(queries.end, keys.end))  # the tokens that both pieces have
    if own.length <= 0:
        return
    if keys.start < own.start:
        yield Region(queries, Piece(keys.start, own.start), False)
    yield Region(own, own, True)
    if own.end < queries.end:
        yield Region(Piece(own.end, queries.end), own, False)


class PieceMask(NamedTuple):
    """The blocks that a piece of queries keeps among all keys that it may see."""

    piece: Piece
    keep: Tensor  # [B, H, rows, cols] bool
    k_index: Tensor | None  # [B, H, 1, keys] int32
    q_index: Tensor | None  # [B, Hq, M] int32
    q_block: int
    k_block: int

    @classmethod
    def of(cls, piece: Piece, masks: list[tuple[GlobalPermutation, BlockMask]]) -> PieceMask:
        """The choices of all KV heads, one after another."""
        k_index = _heads([permutation.k_index for permutation, _ in masks])
        q_index = _heads([permutation.q_index for permutation, _ in masks])
        keep, grid = torch.cat([mask.keep for _, mask in masks], dim=1), masks[0][1].grid
        return cls(piece, keep, k_index, q_index, grid.q_block, grid.k_block)

    def within(self, region: Region, q: Tensor, k: Tensor) -> BlockMask:
        """Kept blocks of `q` `[B, Hq, m, D]` and `k` `[B, Hkv, n, D]`."""
        first = region.queries.start - self.piece.start
        rows = slice(first // self.q_block, -(-(first + region.queries.length) // self.q_block))
        cols = slice(region.keys.start // self.k_block, -(-region.keys.end // self.k_block))
        k_index, q_index = self.k_index, self.q_index
        permutation = GlobalPermutation(
            None if k_index is None else k_index[..., region.keys.start : region.keys.end] - region.keys.start,
            None if q_index is None else q_index[..., first : first + region.queries.length] - first,
        )
        spec = AttentionSpec(scale=1.0, causal=region.causal)  # a grid asks for no scale
        grid = Grid.of(q, k, permutation, spec, q_block=self.q_block, k_block=self.k_block)
        return BlockMask(self.keep[:, :, rows, cols], grid)


def _heads(index: list[Tensor | None]) -> Tensor | None:
    """The maps of all heads; None if tokens stay in place, which does not depend on the head."""
    return torch.cat([each for each in index if each is not None], dim=1) if index[0] is not None else None


@singledispatch
def last_q_of(permuter: object) -> int:
    """How many of the last queries of the whole call order its keys."""
    del permuter
    return 0


@last_q_of.register
def _(permuter: SegmentKeySort) -> int:
    return permuter.last_q


@last_q_of.register
def _(permuter: SegmentQuerySort) -> int:
    return last_q_of(permuter.keys)


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
def for_chunks(permuter: Permuter[Any], last_q: Tensor | None, k: Tensor, call: ShardedCall) -> Permuter[Any]:
    """A permuter that orders a chunk's tokens as `permuter` orders them in the whole call.

    Args:
        last_q: the last queries of the whole call, `[B, Hq, last_q_of(permuter), D]` or all if there are fewer.
        k: the keys of the whole call, `[B, Hkv, N, D]`.
    """
    del last_q, k, call
    return permuter


@for_chunks.register
def _(permuter: SegmentKeySort, last_q: Tensor, k: Tensor, call: ShardedCall) -> Permuter[Any]:
    return _Cut(permuter(last_q, k, call.spec))


@for_chunks.register
def _(permuter: SegmentQuerySort, last_q: Tensor | None, k: Tensor, call: ShardedCall) -> Permuter[Any]:
    return evolve(permuter, keys=for_chunks(permuter.keys, last_q, k, call))


@final
@frozen(eq=False)
class _Cut(Permuter[GlobalPermutation]):
    """The first keys of an order inside segments."""

    whole: GlobalPermutation

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        index = self.whole.k_index
        return evolve(self.whole, k_index=None if index is None else index[..., : k.shape[2]])

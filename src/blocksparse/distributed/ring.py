"""Queries stay where they are: keys and values travel from rank to rank, or are gathered on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import final

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.check.stage import declared
from blocksparse.distributed.heads import of_heads, refuse_apart
from blocksparse.distributed.pieces import (
    Piece,
    PieceMask,
    for_chunks,
    joined,
    last_q_of,
    last_queries,
    refuse_cuts,
    regions,
    split,
)
from blocksparse.distributed.ranks import Ranks, ShardedCall, lengths
from blocksparse.distributed.scheme import Later, SequenceScheme, attend_whole, is_dense
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.score.scorer import ValueScorer
from blocksparse.select.block_mask import BlockMask, RankedBlockMask


@final
@frozen(eq=False)
class Ring(SequenceScheme):
    """Every rank attends with its own queries to the keys and values of one rank after another (Ring Attention).

    Keys and values go round (arXiv 2310.01889), outputs are merged by their lse, and no rank ever holds the values
    of others than two ranks. A mask of the whole call needs the scores of all keys before any block is chosen. So
    blocks are chosen first, with the keys of one KV head at a time, gathered and then dropped. Meanwhile a rank
    holds the `2 N D` numbers of two heads, and keys travel twice.

    It takes the pipelines that `AllGatherKV` takes, with three conditions. Keys stay in place or inside segments
    (`SegmentKeySort`). The blocks of a row do not depend on one another, so an early stop is refused. The executor
    gives an lse. A call has no sinks. A ring never attends densely. Keys, too, must be cut at multiples of the
    tokens by which the pipeline chooses.

    Args:
        attention: a pipeline.
        mesh: a `DeviceMesh`.
        dim: its dimension for sequences.
        head_tail: as for `AllGatherKV`.
    """

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        pipeline = self._pipeline
        for said in declared(pipeline.permuter, Permuter, 0):
            if not (isinstance(said.value, type) and issubclass(said.value, GlobalPermutation)):
                raise ValueError(
                    f"{type(pipeline.permuter).__name__} may give each group of queries its own order, and "
                    "the keys of a ring must stay inside segments. Use AllGatherKV or Ulysses."
                )
        for said in declared(pipeline.executor, Executor, 1):
            if said.value is RankedBlockMask:
                raise ValueError(
                    f"{type(pipeline.executor).__name__} visits all blocks of a row in one order, and a ring has "
                    "the keys of one rank at a time. Use AllGatherKV or Ulysses."
                )

    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: ShardedCall) -> AttentionOutput:
        pipeline, ranks = self._pipeline, self._ranks
        queries, keys = lengths(q, k, v, call, self._all_ranks, scheme=self)
        at = self._aligned(call.spec.causal, (call.Hq, call.Hkv))
        refuse_apart(pipeline, split=False)
        if isinstance(pipeline.scorer, ValueScorer):
            raise ValueError(
                f"{type(pipeline.scorer).__name__} scores blocks by values, and no rank of a ring has those "
                "of all keys. Use AllGatherKV."
            )
        if call.spec.sinks is not None:
            raise ValueError(
                "the call has sinks, and a ring, which attends to the keys of one rank after another, would count "
                "them each time. Use AllGatherKV or Ulysses."
            )
        before = sum(keys) - sum(queries) if call.spec.causal else 0
        if before % at:
            raise ValueError(
                f"the queries of a ring must begin at a multiple of {at} tokens, by which this pipeline chooses "
                f"blocks, and begin after {before} keys. Cut them with shard()."
            )
        q_pieces, k_pieces = self._pieces(queries, before, at), self._pieces(keys, 0, at)
        refuse_cuts(q_pieces, at, "queries")
        refuse_cuts(k_pieces, at, "keys")
        choices = self._choices(q, k, q_pieces, k_pieces, keys, at, call)
        merged = [_Merged(part, v.shape[3]) for part in split(q, q_pieces[ranks.rank])]
        for source, some_k, some_v in _round(ranks, k, v, keys):
            its = k_pieces[source]
            for k_piece, piece_k, piece_v in zip(its, split(some_k, its), split(some_v, its), strict=True):
                for part, choice, result in zip(split(q, q_pieces[ranks.rank]), choices, merged, strict=True):
                    self._add(part, piece_k, piece_v, k_piece, choice, result, call)
        out = torch.cat([result.out for result in merged], dim=2).to(v.dtype)
        return AttentionOutput(out, torch.cat([result.lse for result in merged], dim=2))

    def _add(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_piece: Piece,
        choice: PieceMask,
        result: _Merged,
        call: ShardedCall,
    ) -> None:
        """Attend with the queries of a piece to a piece of keys."""
        executor = self._pipeline.executor
        for region in regions(choice.piece, k_piece, causal=call.spec.causal):
            some_q, some_k = region.queries.within(choice.piece), region.keys.within(k_piece)
            part_q, part_k, part_v = q[:, :, some_q], k[:, :, some_k], v[:, :, some_k]
            mask = choice.within(region, part_q, part_k)
            output = executor(part_q, part_k, part_v, mask, evolve(call.spec, causal=region.causal))
            if output.lse is None:
                raise ValueError(
                    f"{type(executor).__name__} gives no lse for tensors on {q.device.type}, by which a ring "
                    "merges outputs. Choose another executor."
                )
            result.add(some_q, output.out, output.lse)

    def _choices(
        self,
        q: Tensor,
        k: Tensor,
        q_pieces: Sequence[Sequence[Piece]],
        k_pieces: Sequence[Sequence[Piece]],
        keys: Sequence[int],
        at: int,
        call: ShardedCall,
    ) -> list[PieceMask]:
        """The blocks that each piece of this rank keeps, chosen in one KV head after another."""
        pipeline, ranks, causal = self._pipeline, self._ranks, call.spec.causal
        (Hq, Hkv), mine = (q.shape[1], k.shape[1]), q_pieces[ranks.rank]
        end = max(piece.end for its in q_pieces for piece in its)
        group = Hq // Hkv
        last_q = last_queries(q, q_pieces, last_q_of(pipeline.permuter), ranks)
        chosen: list[list[tuple[GlobalPermutation, BlockMask]]] = [[] for _ in mine]
        coming = joined(ranks.gathered(k[:, :1], keys), k_pieces)
        for h in range(Hkv):
            every_k = coming()
            if h + 1 < Hkv:
                coming = joined(ranks.gathered(k[:, h + 1 : h + 2], keys), k_pieces)
            heads = slice(h * group, (h + 1) * group)
            stages = of_heads(pipeline, tuple(range(Hq))[heads], Hq)
            its_last_q = None if last_q is None else last_q[:, heads]
            stages = evolve(stages, permuter=for_chunks(stages.permuter, its_last_q, every_k, call))
            for masks, piece, part in zip(chosen, mine, split(q[:, heads], mine), strict=True):
                some_k = every_k[:, :, : piece.end] if causal else every_k
                spec = call.spec.with_remaining(call.spec.remaining + end - piece.end)
                mask = stages.choose(part, some_k, **spec.arguments()).mask
                permutation = mask.grid.permutation
                if not isinstance(permutation, GlobalPermutation):
                    raise TypeError(f"{type(pipeline.permuter).__name__} gives a {type(permutation).__name__}")
                if permutation.k_index is not None and (permutation.segment is None or at % permutation.segment):
                    raise ValueError(
                        f"the keys of a ring must stay inside segments, and {type(pipeline.permuter).__name__} "
                        "does not promise that they do. Use AllGatherKV or Ulysses."
                    )
                masks.append((permutation, mask))
        return [PieceMask.of(piece, masks) for piece, masks in zip(mine, chosen, strict=True)]


def _round(ranks: Ranks, k: Tensor, v: Tensor, keys: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank, and its keys and values; the first is this rank. Those of the next rank travel meanwhile."""
    left, right = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    for step in range(ranks.size):
        source, following = ((ranks.rank - step - i) % ranks.size for i in (0, 1))
        if step + 1 == ranks.size:
            yield source, k, v
            return
        next_k, next_v = (x.new_empty((*x.shape[:2], keys[following], x.shape[3])) for x in (k, v))
        transfer = ranks.exchange(
            "sending keys and values round", [(right, k), (right, v)], [(left, next_k), (left, next_v)]
        )
        yield source, k, v
        transfer.wait()
        k, v = next_k, next_v


@final
class _Merged:
    """Attention over all the keys that were added so far, in fp32 or better; outputs are merged by their lse."""

    def __init__(self, q: Tensor, Dv: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:3], Dv), dtype=dtype)  # [B, Hq, M, Dv]
        # Differences of lse become weights: what fp32 rounds off a large lse would be an error of all weights.
        self._lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)  # [B, Hq, M]

    @property
    def lse(self) -> Tensor:
        """The log of the softmax denominators, `[B, Hq, M]` fp32."""
        return self._lse.float()

    def add(self, some: slice, out: Tensor, lse: Tensor) -> None:
        """Add attention of the queries `some` over keys that were not added before."""
        before, lse = self._lse[:, :, some], lse.double()
        both = torch.logaddexp(before, lse)
        # A query that saw no key yet has an lse of -inf on both sides, and must not become NaN.
        finite = both.masked_fill(both == float("-inf"), 0.0)
        old, new = ((x - finite).exp().to(self.out.dtype).unsqueeze(-1) for x in (before, lse))
        self.out[:, :, some] = self.out[:, :, some] * old + out.to(self.out.dtype) * new
        self._lse[:, :, some] = both


@final
@frozen(eq=False)
class AllGatherKV(SequenceScheme):
    """Every rank attends in all heads with its own queries, to the keys and values of all ranks.

    A chunk of queries sees the keys up to its own end, as a chunk of a prompt does on one rank. So the pipeline
    must be one that chooses in each row of blocks by itself; its stages say so (`alignment`), and others are
    refused.
    `SegmentKeySort` orders all keys by the last queries of the whole call here too: the ranks that have these
    queries send them to all. Values travel while blocks are chosen.

    Shards must be cut at multiples of the tokens by which the pipeline chooses (blocks and segments), as `shard`
    cuts them. Keys may be cut anywhere.

    Args:
        attention: a pipeline.
        mesh: a `DeviceMesh`.
        dim: its dimension for sequences.
        head_tail: rank `r` has pieces `r` and `2 n - 1 - r` of `2 n`. This balances causal calls, in which late
            queries have more work. By default rank `r` has the piece `r` of `n`.
    """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: ShardedCall) -> AttentionOutput:
        pipeline, ranks = self._pipeline, self._ranks
        queries, keys = lengths(q, k, v, call, self._all_ranks, scheme=self)
        at = self._aligned(call.spec.causal, (call.Hq, call.Hkv))
        M, N = sum(queries), sum(keys)
        before = N - M if call.spec.causal else 0
        q_pieces, k_pieces = self._pieces(queries, before, at), self._pieces(keys, 0, at)
        refuse_cuts(q_pieces, at, "queries")
        all_k, all_v = (joined(ranks.gathered(x, keys), k_pieces) for x in (k, v))
        last_q = last_queries(q, q_pieces, last_q_of(pipeline.permuter), ranks)
        dense = is_dense(pipeline, q, k, v.shape[3], call, M=M, N=N)
        every_k = all_k()
        permuter = pipeline.permuter if dense else for_chunks(pipeline.permuter, last_q, every_k, call)
        outputs = []
        mine = q_pieces[ranks.rank]
        for piece, part in zip(mine, split(q, mine), strict=True):
            end = piece.end if call.spec.causal else N
            its = evolve(call, spec=call.spec.with_remaining(call.spec.remaining + before + M - piece.end))
            some_k, some_v = every_k[:, :, :end], partial(_first, all_v, end)
            outputs.append(attend_whole(pipeline, part, some_k, some_v, its, dense=dense, permuter=permuter))
        lse = [output.lse for output in outputs if output.lse is not None]
        out = torch.cat([output.out for output in outputs], dim=2)
        return AttentionOutput(out, torch.cat(lse, dim=2) if call.with_lse else None)


def _first(tokens: Later, end: int) -> Tensor:
    """The first tokens of those that are on their way."""
    return tokens()[:, :, :end]

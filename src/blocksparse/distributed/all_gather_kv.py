"""Keys and values are gathered on every rank, and queries stay where they are."""

from __future__ import annotations

from functools import partial
from typing import final

import torch
from attrs import evolve, frozen
from torch import Tensor

from blocksparse.distributed import whole
from blocksparse.distributed.call import Call, lengths
from blocksparse.distributed.key_order import for_chunks, last_queries, probed
from blocksparse.distributed.pieces import joined, refuse_cuts, split
from blocksparse.distributed.sequence_scheme import SequenceScheme
from blocksparse.distributed.whole import Later
from blocksparse.execute.executor import AttentionOutput


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
        mesh: a DeviceMesh.
        dim: the name of the dimension of the mesh over which sequences are spread.
        head_tail: of `2 n` pieces of a sequence, rank `r` of `n` has pieces `r` and `2 n - 1 - r`, which balances
            causal calls, in which late queries have more work. By default rank `r` has the piece `r` of `n`.
    """

    def _run(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        pipeline, ranks = self._pipeline, self._ranks
        queries, keys = lengths(q, k, v, call, ranks, options=f"{type(self).__name__} {self.head_tail}")
        at = self._aligned(call.spec.causal, (call.Hq, call.Hkv))
        M, N = sum(queries), sum(keys)
        before = N - M if call.spec.causal else 0
        q_pieces, k_pieces = self._pieces(queries, before, at), self._pieces(keys, 0, at)
        refuse_cuts(q_pieces, at, "queries")
        all_k, all_v = (joined(ranks.gathered(x, keys), k_pieces) for x in (k, v))
        probe = last_queries(q, q_pieces, probed(pipeline.permuter), ranks)
        dense = whole.is_dense(pipeline, q, k, v.shape[3], call, M=M, N=N)
        every_k = all_k()
        permuter = pipeline.permuter if dense else for_chunks(pipeline.permuter, probe, every_k, call)
        outputs = []
        mine = q_pieces[ranks.rank]
        for piece, part in zip(mine, split(q, mine), strict=True):
            end = piece.end if call.spec.causal else N
            its = evolve(call, spec=call.spec.with_remaining(call.spec.remaining + before + M - piece.end))
            some_k, some_v = every_k[:, :, :end], partial(_first, all_v, end)
            outputs.append(whole.attend(pipeline, part, some_k, some_v, its, dense=dense, permuter=permuter))
        lse = [output.lse for output in outputs if output.lse is not None]
        out = torch.cat([output.out for output in outputs], dim=2)
        return AttentionOutput(out, torch.cat(lse, dim=2) if call.with_lse else None)


def _first(tokens: Later, end: int) -> Tensor:
    """The first tokens of those that are on their way."""
    return tokens()[:, :, :end]

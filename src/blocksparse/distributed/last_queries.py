"""The last queries of a call, from the ranks that have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blocksparse.distributed.pieces import Piece
from blocksparse.distributed.ranks import Ranks


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

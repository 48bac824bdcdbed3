"""Messages that turn shards of sequences into whole sequences of some heads, and results back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.distributed.ranks import Ranks, Transfer
from blocksparse.distributed.shares import Share
from blocksparse.layers.head_groups import Heads


@final
@frozen(eq=False)
class Arriving:
    """Whole sequences of the heads of a part, on their way; values come after queries and keys."""

    q: Tensor  # [B, heads of the rank, tokens of all ranks, D]; k and v likewise
    k: Tensor
    v: Tensor
    _first: Transfer
    _second: Transfer

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        part: Sequence[Share],
    ) -> Arriving:
        """Begin to send the shards `q`, `k` and `v` of this rank, and to receive those of its heads.

        Args:
            queries, keys: how many tokens each rank has.
            part: the heads of each rank.
        """
        mine = part[ranks.rank]
        all_q, all_k, all_v = (
            x.new_empty((x.shape[0], len(heads), sum(tokens), x.shape[3]))
            for x, heads, tokens in ((q, mine.queries, queries), (k, mine.keys, keys), (v, mine.keys, keys))
        )
        to_q, to_kv = [share.queries for share in part], [share.keys for share in part]
        first = ranks.exchange(
            "sending queries and keys",
            [*_heads_for(q, to_q), *_heads_for(k, to_kv)],
            [*_tokens_for(all_q, queries), *_tokens_for(all_k, keys)],
        )
        second = ranks.exchange("sending values", _heads_for(v, to_kv), _tokens_for(all_v, keys))
        return cls(all_q, all_k, all_v, first, second)

    def wait(self) -> None:
        """Wait for queries and keys."""
        self._first.wait()

    def waited_v(self) -> Tensor:
        """Wait for values, and return them."""
        self._second.wait()
        return self.v


def back(ranks: Ranks, part: Sequence[Share], tokens: Sequence[int], x: Tensor, out: Tensor) -> Transfer:
    """Begin to send results `x` `[B, heads of the rank, tokens of all ranks, ...]` to the ranks of these tokens.

    Args:
        out: `[B, Hq, tokens of the rank, ...]`, which receives the heads of this part.
    """
    heads = [share.queries for share in part]
    return ranks.exchange("sending outputs", _tokens_for(x, tokens), _heads_for(out, heads))


# A message is one head of one sequence, whose tokens lie one behind the other in memory on both sides. So nothing
# is copied before it is sent, nor after it has arrived, in whatever order heads are spread.


def _heads_for(x: Tensor, heads: Sequence[Heads]) -> list[tuple[int, Tensor]]:
    """For each rank its heads of `x` `[B, H, tokens, ...]`, one by one."""
    return [(rank, x[b, h]) for rank, its in enumerate(heads) for b in range(x.shape[0]) for h in its]


def _tokens_for(x: Tensor, tokens: Sequence[int]) -> list[tuple[int, Tensor]]:
    """For each rank its tokens of each head of `x` `[B, H, tokens of all ranks, ...]`."""
    return [
        (rank, x[b, h, end - n : end])
        for rank, (n, end) in enumerate(zip(tokens, accumulate(tokens), strict=True))
        for b in range(x.shape[0])
        for h in range(x.shape[1])
    ]

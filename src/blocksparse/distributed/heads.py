"""The heads of each rank, a pipeline for some heads, and messages that exchange sequences for heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, final

import attrs
from attrs import frozen
from torch import Tensor

from blocksparse.check.per_head import HeadValues
from blocksparse.distributed.ranks import Ranks, Transfer
from blocksparse.layers.head_groups import AnyPipeline, Heads
from blocksparse.select.combined import SharedByGroup
from blocksparse.select.positions import Random


def arguments(stage: object) -> dict[str, Any]:
    """The values from which a stage, or a pipeline, was made, by the names of its arguments."""
    cls: Any = type(stage)
    return (
        {each.alias: getattr(stage, each.name) for each in attrs.fields(cls) if each.init}
        if attrs.has(cls)
        else {}
    )


def all_in(stage: object) -> Iterator[object]:
    """A pipeline or a stage, and every object inside it."""
    yield stage
    for part in arguments(stage).values():
        yield from all_in(part)


class Share(NamedTuple):
    """The heads of a rank in one part of a call."""

    keys: Heads
    queries: Heads


def shares(Hq: int, Hkv: int, ranks: int, loads: Sequence[float], parts: int) -> list[list[Share]]:
    """The share of each rank in each part; a rank has at most as many parts as it has KV heads.

    Parts have equally many KV heads, or those in the middle one more, because the transfers of the first and the
    last part are not hidden behind computation.

    Args:
        loads: the work of each query head, `[Hq]`.
    """
    group = Hq // Hkv
    if Hq % ranks or (Hkv % ranks and ranks % Hkv):
        raise ValueError(
            f"{Hq} query heads and {Hkv} KV heads cannot be spread evenly over {ranks} ranks. Let the ranks "
            "divide the KV heads, or be a multiple of them that divides the query heads. Or use AllGatherKV, for "
            "any heads. Its pipeline must choose row by row, as auto() does."
        )
    by_key = [loads[h * group : (h + 1) * group] for h in range(Hkv)]
    if ranks > Hkv:  # some ranks for each KV head, which share its query heads
        each = [(h, some) for h in range(Hkv) for some in spread(by_key[h], ranks // Hkv)]
        return [[Share((h,), tuple(h * group + i for i in some)) for h, some in each]]
    spread_keys, count = spread([sum(its) for its in by_key], ranks), Hkv // ranks
    ends = list(accumulate(_sizes(count, min(parts, count)), initial=0))
    parted = ([keys[start:end] for keys in spread_keys] for start, end in pairwise(ends))
    return [
        [Share(keys, tuple(h * group + i for h in keys for i in range(group))) for keys in part] for part in parted
    ]


def _sizes(count: int, parts: int) -> list[int]:
    """`count` in `parts` numbers that differ by at most 1, the greater ones around the middle."""
    least, more = divmod(count, parts)
    from_the_middle = sorted(range(parts), key=lambda i: abs(2 * i + 1 - parts))
    return [least + (i in from_the_middle[:more]) for i in range(parts)]


def spread(loads: Sequence[float], ranks: int) -> list[Heads]:
    """Equally many of `len(loads)` heads for each rank, so that the loads of ranks are much alike.

    The heaviest head left goes to the rank with the least load that has room; of equal ones the first. Each rank
    has its heads in this order, the heaviest first. So ranks that attend to them part by part have about the same
    work at any time. With equal loads, rank 0 gets the first heads.
    """
    each = len(loads) // ranks
    if len(set(loads)) <= 1:
        return [tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for head in sorted(range(len(loads)), key=lambda head: (-loads[head], head)):
        room = [rank for rank in range(ranks) if len(taken[rank]) < each]
        rank = min(room, key=lambda rank: (total[rank], rank))
        taken[rank].append(head)
        total[rank] += loads[head]
    return [tuple(heads) for heads in taken]


T = TypeVar("T")


def of_heads(stage: T, heads: Heads, of: int) -> T:
    """`stage`, or a whole pipeline, for some query heads of `of`, with options per query head of these alone."""
    changed = {}
    for name, old in arguments(stage).items():
        new: Any = _values_of(old, heads, of) if isinstance(old, HeadValues) else of_heads(old, heads, of)
        if new is not old:
            changed[name] = new
    return attrs.evolve(stage, **changed) if changed else stage  # type: ignore[misc]


def _values_of(values: HeadValues, heads: Heads, of: int) -> HeadValues:
    if len(values.values) != of:
        raise ValueError(
            f"a per-head value needs one entry per query head ({of}): {len(values.values)}. "
            "Give those of the whole model."
        )
    return HeadValues(values.values[list(heads)])


def refuse_apart(pipeline: AnyPipeline, *, split: bool) -> None:
    """Refuse a pipeline that chooses otherwise in some heads than in all of them.

    Args:
        split: whether the query heads of one KV head are apart.
    """
    for stage in all_in(pipeline):
        name = type(stage).__name__
        if isinstance(stage, Random):
            raise ValueError(
                f"'{name}' needs the index of the KV head in the whole model, which a rank with some heads does "
                "not have. Use AllGatherKV, whose ranks have all heads."
            )
        if split and isinstance(stage, SharedByGroup):
            raise ValueError(
                f"'{name}' joins the query heads of a KV head, which are on several ranks here. Leave it out, or "
                "use no more ranks than KV heads."
            )
        if split and getattr(stage, "per_query_head", True) is False:
            raise ValueError(
                f"'{name}' has one order for the query heads of a KV head, which are on several ranks here. Give "
                "it per_query_head=True, or use no more ranks than KV heads."
            )


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

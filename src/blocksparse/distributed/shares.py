"""Which heads each rank attends in, and when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from blocksparse.layers.head_groups import Heads


class Share(NamedTuple):
    """The heads of a rank in one part of a call."""

    keys: Heads
    queries: Heads


def shares(Hq: int, Hkv: int, ranks: int, loads: Sequence[float], parts: int) -> list[list[Share]]:
    """The share of each rank in each part; a rank has at most as many parts as it has KV heads.

    Parts have equally many KV heads, or those in the middle one more: what the first part waits for, and what the
    last one sends, travels while nothing is computed.

    Args:
        loads: the work of each query head, `[Hq]`.

    Raises:
        ValueError: the heads cannot be spread evenly.
    """
    group = Hq // Hkv
    if Hq % ranks or (Hkv % ranks and ranks % Hkv):
        raise ValueError(
            f"{Hq} query heads and {Hkv} KV heads cannot be spread evenly over {ranks} ranks: their number must "
            "divide the KV heads, or be a multiple of them that divides the query heads; AllGatherKV takes any "
            "heads, for pipelines that choose in each row of blocks by themselves, as auto() does"
        )
    by_key = [loads[h * group : (h + 1) * group] for h in range(Hkv)]
    if ranks > Hkv:  # some ranks for each KV head, which share its query heads
        each = [(h, some) for h in range(Hkv) for some in spread(by_key[h], ranks // Hkv)]
        return [[Share((h,), tuple(h * group + i for i in some)) for h, some in each]]
    spread_keys, count = spread([sum(its) for its in by_key], ranks), Hkv // ranks
    ends = list(accumulate(_sizes(count, min(parts, count)), initial=0))
    return [[_whole_groups(keys[start:end], group) for keys in spread_keys] for start, end in pairwise(ends)]


def _sizes(count: int, parts: int) -> list[int]:
    """`count` in `parts` numbers that differ by at most 1, the greater ones around the middle."""
    least, more = divmod(count, parts)
    from_the_middle = sorted(range(parts), key=lambda i: abs(2 * i + 1 - parts))
    return [least + (i in from_the_middle[:more]) for i in range(parts)]


def _whole_groups(keys: Heads, group: int) -> Share:
    return Share(keys, tuple(h * group + i for h in keys for i in range(group)))


def spread(loads: Sequence[float], ranks: int) -> list[Heads]:
    """Equally many of `len(loads)` heads for each rank, so that the loads of ranks are much alike.

    The heaviest head left goes to the rank with the least load that has room; of equal ones the first. Each rank
    has its heads in this order, the heaviest first, so that ranks that attend to them part by part have much the
    same work at any time. With equal loads, rank 0 gets the first heads.
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

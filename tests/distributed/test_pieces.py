"""Where sequences are cut, how heads are spread, and which pairs a piece of queries and a piece of keys have."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from blocksparse.distributed.heads import shares, spread
from blocksparse.distributed.pieces import Piece, cut, head_tail, in_order, regions


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.parametrize(
    ("tokens", "ranks", "before", "at"), [(1000, 3, 0, 16), (777, 2, 100, 32), (64, 1, 5, 16)]
)
def test_cut_is_read_back_from_lengths(tokens: int, ranks: int, before: int, at: int, both_ends: bool) -> None:
    pieces = cut(tokens, ranks, before, at, both_ends=both_ends)
    everything = sorted(piece for its in pieces for piece in its)
    assert [everything[0].start, everything[-1].end] == [before, before + tokens]
    assert all(one.end == other.start and one.end % at == 0 for one, other in pairwise(everything))
    lengths = [sum(piece.length for piece in its) for its in pieces]
    assert (head_tail(lengths, before, at) if both_ends else in_order(lengths, before)) == pieces
    if not both_ends:
        assert max(lengths) - min(lengths) <= 2 * at


def test_head_and_tail_balance_causal_work() -> None:
    for its in cut(64 * 1024, 8, 0, 128, both_ends=True):
        assert sum((piece.start + piece.end) * piece.length for piece in its) == 64 * 1024 * 64 * 1024 // 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "keys", [Piece(0, 16), Piece(0, 64), Piece(16, 48), Piece(32, 96), Piece(64, 80), Piece(40, 44)]
)
def test_regions_cover_each_pair_once(keys: Piece, causal: bool) -> None:
    queries = Piece(32, 64)
    pairs = torch.zeros(100, 100, dtype=torch.int32)
    for region in regions(queries, keys, causal=causal):
        its = torch.ones(region.queries.length, region.keys.length, dtype=torch.int32)
        if region.causal:
            assert region.queries == region.keys
            its = its.tril()
        pairs[region.queries.start : region.queries.end, region.keys.start : region.keys.end] += its
    want = torch.zeros_like(pairs)
    want[queries.start : queries.end, keys.start : keys.end] = 1
    assert torch.equal(pairs, want.tril() if causal else want)


def test_heads_are_spread_by_their_loads() -> None:
    loads = [0.9, 0.1, 0.8, 0.2, 0.5, 0.5, 0.3, 0.7]
    heads = spread(loads, 4)
    assert sorted(head for its in heads for head in its) == list(range(8))
    assert [len(its) for its in heads] == [2] * 4
    assert max(sum(loads[head] for head in its) for its in heads) <= 1.01
    assert spread([0.5] * 4, 2) == [(0, 1), (2, 3)]
    assert spread([0.0, 0.0, 0.0, 1.0], 2) == [(3, 2), (0, 1)]  # the heaviest first


@pytest.mark.parametrize(
    ("kv_heads", "parts", "sizes"),
    [
        (4, 3, [1, 2, 1]),
        (4, 1, [4]),
        (4, 4, [1, 1, 1, 1]),
        (2, 3, [1, 1]),
        (8, 3, [3, 3, 2]),
        (5, 4, [1, 2, 1, 1]),
    ],
)
def test_the_first_and_the_last_part_are_the_small_ones(kv_heads: int, parts: int, sizes: list[int]) -> None:
    """Nothing is computed while the first part arrives, nor while the last one leaves."""
    every = shares(4 * kv_heads, 2 * kv_heads, 2, [1.0] * 4 * kv_heads, parts)
    for rank in (0, 1):
        assert [len(part[rank].keys) for part in every] == sizes
        assert sum((part[rank].keys for part in every), ()) == tuple(range(rank * kv_heads, (rank + 1) * kv_heads))
        assert [len(part[rank].queries) for part in every] == [2 * size for size in sizes]

"""Sizes far beyond the prompt act as the prompt's length, and take no more memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.testing import make_qkv
from tests.largest import Largest

LONG = 2**20  # all tokens of every prompt here
FAR = (2**31 - 1, 2**32 + 1, 2**63, 2**70)
EXECUTOR = bs.ReferenceExecutor()


def pick(
    selector: bs.Selector[Any, Any], scorer: bs.Scorer[Any, Any] | None = None, permuter: Any = None
) -> AnyPipeline:
    return bs.Pipeline(permuter or bs.Identity(), scorer or bs.MeanPoolScorer(16), selector, EXECUTOR)


def lines(selector: bs.Selector[Any, Any]) -> AnyPipeline:
    return pick(selector, bs.VerticalSlashScorer(16, last_q=16))


def tiles(**arguments: Any) -> AnyPipeline:
    return bs.bfla(0.5, block=32, g=16, tile=16, eta=arguments.pop("eta", None), executor=EXECUTOR, **arguments)


def segments(**arguments: Any) -> AnyPipeline:
    return bs.Pipeline(
        bs.GlobalIndexMap(64, **arguments), bs.NoScorer(16), bs.Ranked(bs.Everything()), bs.GatherExecutor(0.1)
    )


HALF = bs.TopCdf(0.5)
TAKES: dict[str, Callable[[int], AnyPipeline]] = {
    "Band": lambda n: pick(bs.Band(n)),
    "Sink": lambda n: pick(bs.Sink(n)),
    "LastQueries": lambda n: pick(bs.LastQueries(n)),
    "LastKeys": lambda n: pick(bs.LastKeys(n)),
    "union": lambda n: pick(bs.Band(n) | bs.Sink(n)),
    "OnTiles": lambda n: pick(bs.OnTiles(bs.Band(n), 2)),
    "Stride": lambda n: pick(bs.Stride(n)),
    "Stride released": lambda n: pick(bs.Stride(n, released=True)),
    "TopK": lambda n: pick(bs.TopK(n)),
    "a_shape sink": lambda n: bs.a_shape(n, 1, block=16, executor=EXECUTOR),
    "a_shape local": lambda n: bs.a_shape(1, n, block=16, executor=EXECUTOR),
    "tri_shape last": lambda n: bs.tri_shape(1, 1, n, block=16, executor=EXECUTOR),
    "bfla n_local": lambda n: tiles(n_local=n),
    "bfla n_local_tiles": lambda n: tiles(n_local_tiles=n),
    "bfla sink": lambda n: tiles(n_local=0, sink=n),
    "bfla eta": lambda n: tiles(eta=n),
    "VerticalSlashScorer last_q": lambda n: pick(bs.VerticalSlashCdf(0.5), bs.VerticalSlashScorer(16, last_q=n)),
    "VerticalSlashCdf min_budget": lambda n: lines(bs.VerticalSlashCdf(0.5, min_budget=n)),
    "VerticalSlashCdf max_budget": lambda n: lines(bs.VerticalSlashCdf(0.5, max_budget=n)),
    "VerticalSlashCdf released": lambda n: lines(bs.VerticalSlashCdf(0.5, min_budget=n, released=True)),
    "VerticalSlashCdf released max": lambda n: lines(bs.VerticalSlashCdf(0.5, max_budget=n, released=True)),
    "VerticalSlashTopK vertical": lambda n: lines(bs.VerticalSlashTopK(n, 3)),
    "VerticalSlashTopK slash": lambda n: lines(bs.VerticalSlashTopK(3, n)),
    "VerticalSlashTopK sink": lambda n: lines(bs.VerticalSlashTopK(9, 9, sink=n)),
    "VerticalSlashTopK recent": lambda n: lines(bs.VerticalSlashTopK(9, 9, recent=n)),
    "VerticalSlashTopK released": lambda n: lines(bs.VerticalSlashTopK(9, 9, sink=n, recent=n, released=True)),
    "SegmentKeySort S": lambda n: pick(HALF, bs.FlattenMaxPoolScorer(16, 8), bs.SegmentKeySort(n)),
    "SegmentKeySort last_q": lambda n: pick(HALF, permuter=bs.SegmentKeySort(64, last_q=n)),
    "SegmentQuerySort S": lambda n: pick(HALF, permuter=bs.SegmentQuerySort(16 * n, block=16)),
    "SegmentKeySort S, of whole blocks": lambda n: pick(HALF, bs.MeanPoolScorer(16), bs.SegmentKeySort(16 * n)),
    "SegmentKeySort S, of whole cells": lambda n: pick(
        HALF, bs.AntidiagonalScorer(4, block=16, forced=False), bs.SegmentKeySort(16 * n)
    ),
    "pbs_attn S": lambda n: bs.pbs_attn(block=16, S=16 * n, executor=EXECUTOR),
    "pbs_attn_plus S": lambda n: bs.pbs_attn_plus(block=16, S=16 * n, executor=EXECUTOR),
    "TileOrder tile": lambda n: pick(HALF, permuter=bs.TileOrder((2, 4, 9), (n, n, n))),
    "GlobalIndexMap prefix": lambda n: segments(prefix=n),
    "GlobalIndexMap guide": lambda n: segments(guide=n),
    "GlobalIndexMap near": lambda n: segments(near=n),
    "GatherExecutor patience": lambda n: bs.s2o(
        S=64, block=16, executor=bs.GatherExecutor(0.1, patience=n)
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", TAKES.values(), ids=TAKES)
def test_far_is_all(make: Callable[[int], AnyPipeline]) -> None:
    q, k, v = make_qkv(N=72, D=8, Hq=2, Hkv=1)
    ways = (True,) if isinstance(make(LONG).permuter, bs.GlobalIndexMap) else (True, False)
    for causal in ways:
        want = make(LONG).trace(q, k, v, causal=causal)
        for n in FAR:
            got = make(n).trace(q, k, v, causal=causal)
            assert torch.equal(got.visited.keep, want.visited.keep)
            assert torch.equal(got.output.out, want.output.out)


MOST = 16384  # tokens of the largest block
BLOCKS: dict[str, AnyPipeline] = {
    "MeanPoolScorer": pick(HALF, bs.MeanPoolScorer(MOST)),
    "NoScorer": pick(bs.Sink(), bs.NoScorer(MOST)),
    "PrefixOrderScorer": pick(HALF, bs.PrefixOrderScorer(MOST)),
    "FlattenMaxPoolScorer": pick(HALF, bs.FlattenMaxPoolScorer(MOST, 1)),
    "FlattenMaxPoolScorer g": pick(HALF, bs.FlattenMaxPoolScorer(MOST, MOST)),
    "AntidiagonalScorer": pick(HALF, bs.AntidiagonalScorer(1, block=MOST)),
    "AntidiagonalScorer stride": pick(HALF, bs.AntidiagonalScorer(MOST, block=MOST)),
    "AntidiagonalScorer sum": pick(HALF, bs.AntidiagonalScorer(MOST // 4, block=MOST, pattern="sum")),
    "SimilarityGatedScorer": pick(HALF, bs.SimilarityGatedScorer(bs.MeanPoolScorer(MOST), 0.5)),
    "VerticalSlashScorer": pick(bs.VerticalSlashCdf(0.5), bs.VerticalSlashScorer(MOST)),
    "SegmentQuerySort": pick(HALF, permuter=bs.SegmentQuerySort(2**40, block=MOST)),
    "GlobalIndexMap": bs.s2o(S=MOST, block=64),
}


@pytest.mark.parametrize("pipeline", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("M", "N"), [(20, 20), (3, 20), (1100, 1100), (7, 1100)])
def test_a_block_beyond_the_prompt_is_all_of_it(pipeline: AnyPipeline, M: int, N: int) -> None:
    """And room is made for the tokens that are there, and for a row of places, not for what a block could hold."""
    q, k, _ = make_qkv(N=N, M=M, D=8, Hq=2, Hkv=1)
    with Largest() as made:
        permutation = pipeline.permuter(q, k, bs.AttentionSpec(scale=0.5))
        scores = pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=0.5))
        keep = pipeline.selector(scores).keep
    assert made.numbers <= max(16 * MOST, 4 * max(N, 1024) ** 2)
    if scores.grid.k_block == MOST:
        assert bool(keep.all())
        assert keep.shape == (1, 2, 1, 1)


def test_the_largest_block_keeps_every_pair() -> None:
    q, k, v = make_qkv(N=50, D=8)
    got = bs.xattention(block=MOST, stride=1, executor=EXECUTOR)(q, k, v)
    want = bs.xattention(block=64, executor=EXECUTOR)(q, k, v)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="'block' must be a whole number from 1 to 16384: 1099511627776"):
        bs.mean_pooling(block=2**40)

"""Selectors that know from sizes alone that they keep everything: what they say is true, and they do say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.pipeline_core import EVERYTHING
from blocksparse.select.selector import Selector
from blocksparse.testing import every_preset, make_qkv

N, M = 200, 70
SURE: dict[str, tuple[Any, Any]] = {  # what says so for N keys, and the same with one token less, or a little less
    "everything": (bs.Everything(), None),
    "band": (bs.Band(N - 1), bs.Band(N - 2)),
    "sink": (bs.Sink(N), bs.Sink(N - 1)),
    "last queries": (bs.LastQueries(M), bs.LastQueries(M - 1)),
    "last keys": (bs.LastKeys(N), bs.LastKeys(N - 1)),
    "stride": (bs.Stride(1), bs.Stride(2)),
    "positions": (bs.Band(3) | bs.Sink(N), bs.Band(3) | bs.Sink(3)),
    "first and near": (bs.Band(N - 9) | bs.Stride(50) | bs.Sink(8), bs.Band(N - 9) | bs.Stride(50) | bs.Sink(7)),
    "mass": (bs.TopCdf(1), bs.TopCdf(0.99)),
    "mass of a head": (bs.TopCdf([1.0, 1.0]), bs.TopCdf([1.0, 0.9])),
    "mass of all rows": (bs.GlobalTopCdf(1), bs.GlobalTopCdf(0.99)),
    "share": (bs.TopK(share=1), bs.TopK(share=0.99)),
    "number": (bs.TopK(N), bs.TopK(N - 1)),
    "distances": (bs.VerticalSlashTopK(1, N), bs.VerticalSlashTopK(1, N - 1)),
    "columns": (bs.VerticalSlashCdf(0.5, min_budget=N), bs.VerticalSlashCdf(0.5, min_budget=N - 1)),
    "either": (bs.TopCdf(0.3) | bs.Sink(N), bs.TopCdf(0.3) | bs.Sink(3)),
    "both": (bs.TopCdf(1) & bs.Sink(N), bs.TopCdf(1) & bs.Sink(N - 1)),
    "shared": (bs.SharedByGroup(bs.TopCdf(1)), bs.SharedByGroup(bs.TopCdf(0.9))),
    "refined": (bs.Refined(bs.TopCdf(1), 2), bs.Refined(bs.TopCdf(0.9), 2)),
    "tiles": (bs.Refined(bs.TopCdf(0.1), 2) | bs.OnTiles(bs.Sink(N), 2), None),
    "ranked": (bs.Ranked(bs.TopCdf(1)), bs.Ranked(bs.TopCdf(0.9), first=bs.Band(5))),
    "ranked first": (bs.Ranked(bs.TopCdf(0.9), first=bs.Band(N)), None),
    "routed": (
        bs.RoutedByDivergence(0.1, bs.GlobalTopCdf(1), bs.Everything()),
        bs.RoutedByDivergence(0.1, bs.GlobalTopCdf(1), bs.Sink(1)),
    ),
    "by causality": (
        bs.SelectorByCausality(bs.TopCdf(1), bs.TopCdf(0.5)),
        bs.SelectorByCausality(bs.TopCdf(0.5), bs.TopCdf(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SURE)
def test_what_they_say_is_true(name: str) -> None:
    sure, less = SURE[name]
    assert sure.keeps_everything(M, N, causal=True)
    assert less is None or not less.keeps_everything(M, N, causal=True)
    said = 0
    for selector in filter(None, (sure, less)):
        calls = ((M, N, True), (N, N, True), (M, N, False), (N, M, False), (N - 1, N - 1, True))
        for queries, keys, causal in calls:
            q = make_qkv(N=queries, Hq=2, Hkv=1, D=16)[0]
            k = make_qkv(N=keys, Hq=2, Hkv=1, D=16, seed=1)[1]
            if selector.keeps_everything(queries, keys, causal=causal):
                said += 1
                assert _keeps(selector, q, k, causal)
                q[:, :, ::7], k[:, :, ::5] = float("nan"), float("inf")
                assert _keeps(selector, q, k, causal, window=40 if causal else None)
    assert said >= 2


def _keeps(
    selector: Selector[Any, Any], q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None = None
) -> bool:
    pipeline = bs.Pipeline(bs.Identity(), bs.VerticalSlashScorer(16), selector, bs.ReferenceExecutor())
    mask = pipeline.choose(q, k, causal=causal, window=window).mask
    return torch.equal(mask.keep, mask.grid.visible.expand_as(mask.keep))


@pytest.mark.parametrize("dense_below", [None, 1e12], ids=["keeps everything", "little work"])
def test_numbers_of_other_heads_are_refused_in_a_dense_call(dense_below: float | None) -> None:
    q, k, v = make_qkv(N=N, Hq=4, Hkv=2, D=16)
    for selector in (bs.TopCdf([1.0] * 3), bs.Band(N) | bs.TopCdf([1.0] * 3)):
        pipeline = bs.Pipeline(
            bs.Identity(), bs.MeanPoolScorer(16), selector, bs.AutoExecutor(dense_below=dense_below)
        )
        with pytest.raises(ValueError, match=r"TopCdf: 'mass' has 3 entries for 4 query heads\. Give one"):
            pipeline(q, k, v)
        evolve(pipeline, selector=bs.TopCdf([1.0] * 4))(q, k, v)


def test_a_call_is_then_dense_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(N=N, Hq=2, Hkv=1, D=16)
    pipeline = every_preset["minference"](20, N, block=16)
    trace = pipeline.trace(q, k, v)
    assert trace.dense_because == EVERYTHING
    # No work is too much for that, so the demo, which asks for masks however short a prompt, is dense as well.
    assert evolve(pipeline, executor=bs.AutoExecutor(dense_below=0)).dense_because(q, k, v, trace.spec) is not None
    shorter, given = (every_preset["minference"](20, N - 1, block=16), evolve(pipeline, executor=bs.CpuExecutor()))
    assert shorter.trace(q, k, v).dense_because is given.trace(q, k, v).dense_because is None

    def stage_runs(*_: object, **__: object) -> None:
        raise AssertionError("a stage runs")

    monkeypatch.setattr(bs.VerticalSlashScorer, "__call__", stage_runs)
    torch.testing.assert_close(pipeline(q, k, v), dense_attention(q, k, v, bs.AttentionSpec(scale=0.25)))
    with pytest.raises(AssertionError, match="a stage runs"):
        shorter(q, k, v)

"""A stage is its own configuration: what `repr` writes, Python reads back with the package's names alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv
from tests.arguments import TARGETS
from tests.stages import EXECUTORS, PERMUTERS, REFINED, SCORERS, SELECTORS, Shuffle

inf = float("inf")
FP32: Any = np.float32(0.1)
HEADS = [0.25, 1.0, 0.1]
PAPER = bs.pbs_attn()
ODD: list[Any] = [
    bs.Threshold(inf), bs.Threshold(-inf), bs.Threshold([inf, -inf, 0.5]), bs.Threshold(torch.tensor([1.0, inf])),
    bs.Threshold(2**60), bs.Threshold(1e-300), bs.TopCdf(FP32), bs.TopCdf(torch.tensor(0.1)), bs.TopCdf(HEADS),
    bs.GlobalTopCdf(torch.tensor(HEADS)), bs.TopK(share=HEADS), bs.Random(HEADS, 2**32 - 1, released=True),
    bs.GatherExecutor(inf), bs.GatherExecutor([inf, 0]), bs.RoutedByDivergence(inf, bs.TopK(1), bs.TopCdf(HEADS)),
    bs.VerticalSlashTopK([1, 2], torch.tensor([3, 4])), bs.SimilarityGatedScorer(bs.MeanPoolScorer(), [-1, 1, 0]),
    bs.TritonExecutor(bs.TritonTiles(64, 32, 4, 2), pv_skip=[-1.0, -1e30]),
    bs.Int8Executor(False, scales="block", tiles=bs.TritonTiles(64, 32, 4, 2)),
    bs.Int8Executor(tiles=bs.HopperTiles(1, 64, 2)), bs.Band(2**70), bs.Band(1) | (bs.Sink() | bs.Band(2)),
    bs.GivenOrder((1, 2, 2), torch.tensor([3, 1, 0, 2])), bs.GivenOrder((2, 30, 30), torch.arange(1799, -1, -1)),
    bs.AttentionSpec(scale=0.1, causal=True, window=9, softcap=30, sinks=HEADS),
    (bs.Sink() | bs.Band(3)) & (bs.TopK(1) | bs.Refined(bs.Ranked(bs.Sink()), 2)),
    bs.HeadGroups({(0, 2): PAPER, (1,): None}),
    bs.Schedule(PAPER, layers={3: bs.HeadGroups({(0,): bs.sparge(HEADS)}), -1: None}, dense=range(2)),
    *(preset() for preset in every_preset.values()),
    bs.bfla(rho=HEADS, eta=None), bs.s2o(inf, prefix=None), bs.sparge(share=HEADS, order=bs.TileOrder((1, 8, 8))),
    bs.flex_prefill(HEADS, [inf, 0, 1]), bs.minference([5, 6], as_released=True),
]  # fmt: skip
STAGES = [s for s in (*PERMUTERS, *SCORERS, *SELECTORS, *REFINED, *EXECUTORS) if not isinstance(s, Shuffle)]


def read(written: str) -> Any:
    return eval(written, dict(vars(bs)))


@pytest.mark.parametrize("stage", [*STAGES, *ODD], ids=lambda stage: repr(stage)[:60])
def test_what_is_written_is_read_back(stage: Any) -> None:
    assert "\n" not in repr(stage)
    again = read(repr(stage))
    assert type(again) is type(stage)
    assert repr(again) == repr(stage)


def test_every_target_is_written() -> None:
    for target, given, _ in TARGETS:
        if isinstance(target, type):
            assert repr(read(repr(target(**given)))) == repr(target(**given))


@pytest.mark.parametrize(
    "pipeline",
    [
        bs.mean_pooling(HEADS[:2] * 2, block=16, executor=bs.ReferenceExecutor()),
        bs.Pipeline(
            bs.GivenOrder((1, 8, 9), bs.HilbertOrder((1, 8, 9)).cells("cpu")),
            bs.FlattenMaxPoolScorer(16, 8),
            bs.Threshold([0.1, inf, -inf, 0.4]),
            bs.ReferenceExecutor(),
        ),
    ],
)
def test_what_is_read_back_computes_the_same(pipeline: Any) -> None:
    inputs = make_qkv(N=72, D=8)
    assert torch.equal(read(repr(pipeline))(*inputs), pipeline(*inputs))


def test_an_order_is_its_own() -> None:
    """Later writes to what it was given change nothing."""
    given = torch.tensor([1, 0, 2])
    order = bs.GivenOrder((1, 1, 3), given)
    given[0] = 7
    assert order.cells("cpu").tolist() == [1, 0, 2]

"""Stages and what holds them are values: equal means equal, and what `repr` writes Python reads back."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.distributed.pieces import for_chunks
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.testing import every_preset, make_qkv
from tests import stages
from tests.arguments import TARGETS
from tests.cases import each
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
STAGES: list[Any] = [
    s for s in (*PERMUTERS, *SCORERS, *SELECTORS, *REFINED, *EXECUTORS) if not isinstance(s, Shuffle)
]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@each("value", [x for x in (*STAGES, *ODD) if type(x).__module__.startswith("blocksparse")])
def test_a_copy_is_equal(value: Any, copied: Callable[[Any], Any]) -> None:
    hash(value)  # which is remembered, and a copy in another process must not have it
    twin = copied(value)
    assert twin == value, "compare by value: write @frozen(cache_hash=True) above the class"
    assert hash(twin) == hash(value)
    assert {value: 1}[twin] == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (bs.TopCdf(0.9), bs.TopCdf(0.8)),
        (bs.TopCdf([0.9, 0.8]), bs.TopCdf([0.8, 0.9])),
        (bs.TopCdf([0.9, 0.8]), bs.TopCdf(0.9)),
        (bs.TopK(2) | bs.Sink(), bs.TopK(2) & bs.Sink()),
        (bs.MeanPoolScorer(64), bs.NoScorer(64)),
        (bs.GivenOrder((1, 2, 2), [3, 1, 0, 2]), bs.GivenOrder((1, 2, 2), [3, 1, 2, 0])),
        (bs.HeadGroups({(0, 1): None}), bs.HeadGroups({(1, 0): None})),
        (bs.Schedule(PAPER), bs.Schedule(PAPER, dense=[0])),
        (bs.AttentionSpec(scale=0.1), bs.AttentionSpec(scale=0.1, sinks=[0.0])),
    ],
    ids=stages.name,
)
def test_what_differs_is_not_equal(one: Any, other: Any) -> None:
    assert one != other


def test_numbers_per_head_count_by_their_values() -> None:
    given = torch.tensor([0.5, 0.25])
    assert bs.TopCdf(given) == bs.TopCdf([0.5, 0.25]) == bs.TopCdf(given.double())
    assert bs.HeadGroups({(0,): PAPER, (1,): None}) == bs.HeadGroups({(1,): None, (0,): bs.pbs_attn()})


@pytest.mark.parametrize("name", every_preset)
def test_a_trace_is_pickled(name: str) -> None:
    trace = every_preset[name]().trace(*make_qkv(N=200, D=16))
    twin = pickle.loads(pickle.dumps(trace))
    assert torch.equal(twin.output.out, trace.output.out)
    assert torch.equal(twin.mask.keep, trace.mask.keep)
    assert torch.equal(twin.visited.keep, trace.visited.keep)
    if isinstance(trace.scores, bs.VerticalSlashScores):  # which compute lines when they are asked for them
        for line in ("vertical", "slash", "divergence"):
            assert torch.equal(getattr(twin.scores, line), getattr(trace.scores, line))


def test_the_memory_of_a_pipeline_that_holds_tensors_is_given_back() -> None:
    """Ranks make such a one in every call, and no other pipeline is ever equal to it."""
    q, k, v = make_qkv(N=300, D=16)
    call: Any = SimpleNamespace(spec=bs.AttentionSpec(scale=1.0))
    permuter: Any = for_chunks(bs.SegmentKeySort(64), q, k, call)
    pipeline = evolve(PAPER, permuter=permuter)
    pipeline(q, k, v)
    order = ref(permuter.whole.k_index)
    assert order() is not None
    del permuter, pipeline
    gc.collect()
    assert order() is None


LAYERS: tuple[dict[str, Any], ...] = (
    {}, {"causal": False}, {"scale": -0.2}, {"scale": 0}, {"window": 100},
    {"softcap": 3.0, "sinks": [0.0, 1.0, 2.0, 3.0]},
)  # fmt: skip


@pytest.mark.parametrize("name", every_preset)
@each("asked", LAYERS)
def test_choose_then_attend_is_the_call(name: str, asked: dict[str, Any]) -> None:
    pipeline: Any = every_preset[name]()
    q, k, v = make_qkv(N=300, M=200, D=16)
    if isinstance(pipeline.executor, bs.GatherExecutor) and (
        asked.keys() & {"window", "softcap"} or asked.get("causal") is False
    ):
        pytest.skip("S2O is causal, and its kernel knows neither")
    expected = pipeline(q, k, v, **asked)
    choice = pipeline.choose(q, k, v, **asked)
    torch.testing.assert_close(pipeline.attend(q, k, v, choice).out, expected)
    out = torch.empty_like(expected)
    assert pipeline.attend(q, k, v, choice, out).out is out
    torch.testing.assert_close(out, expected)


def test_a_choice_may_be_attended_to_again() -> None:
    pipeline = bs.mean_pooling(0.5, block=16, executor=bs.CpuExecutor())
    q, k, v = make_qkv(N=200, D=16)
    choice = pipeline.choose(q, k, scale=-0.3, window=90)
    other_q, other_k, other_v = (x.flip(2) for x in (q, k, v))
    got = pipeline.attend(other_q, other_k, other_v, choice).out
    spec = bs.AttentionSpec(scale=0.3, window=90)
    want = bs.ReferenceExecutor()(-other_q, other_k, other_v, choice.mask, spec).out
    torch.testing.assert_close(got, want)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.CpuExecutor())
    whole = everything.attend(other_q, other_k, other_v, everything.choose(q, k)).out
    torch.testing.assert_close(whole, dense_attention(other_q, other_k, other_v, bs.AttentionSpec(scale=0.25)))


def test_a_choice_for_another_call_is_refused() -> None:
    pipeline = bs.mean_pooling(0.5, block=16, executor=bs.CpuExecutor())
    q, k, v = make_qkv(N=100, D=16)
    choice = pipeline.choose(q, k)
    message = r"this choice was made for torch\.float32, and q and k are torch\.float16"
    with pytest.raises(ValueError, match=message):
        pipeline.attend(q.half(), k.half(), v.half(), choice)
    ranked = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Ranked(bs.TopK(2)), bs.GatherExecutor())
    with pytest.raises(TypeError, match="GatherExecutor needs a RankedBlockMask, and got a BlockMask"):
        ranked.attend(q, k, v, choice)  # type: ignore[arg-type]


def test_a_preset_with_equal_arguments_is_one_object() -> None:
    """So that a model that calls `preset()(q, k, v)` pays for one. Arguments of other types are other ones."""
    assert bs.pbs_attn(0.8, executor=bs.AutoExecutor()) is bs.pbs_attn(0.8, executor=bs.AutoExecutor())
    assert bs.pbs_attn(1) is not bs.pbs_attn(1.0)
    mass = torch.tensor([0.8, 0.9])
    first = bs.pbs_attn(mass)
    mass += 0.05
    assert bs.pbs_attn(mass) != first


def read(written: str) -> Any:
    return eval(written, dict(vars(bs)))


@pytest.mark.parametrize("stage", [*STAGES, *ODD], ids=lambda stage: repr(stage)[:60])
def test_what_is_written_is_read_back(stage: Any) -> None:
    assert "\n" not in repr(stage)
    again = read(repr(stage))
    assert type(again) is type(stage)
    assert again == stage
    assert repr(again) == repr(stage)


def test_every_target_is_written() -> None:
    for target, given, _ in TARGETS:
        if isinstance(target, type):
            assert repr(read(repr(target(**given)))) == repr(target(**given))


def test_later_writes_to_what_was_given_change_nothing() -> None:
    given = torch.tensor([1, 0, 2])
    order = bs.GivenOrder((1, 1, 3), given)
    given[0] = 7
    assert order.cells("cpu").tolist() == [1, 0, 2]
    layers, groups = dict[int, Any]({1: PAPER}), dict[tuple[int, ...], Any]({(0,): PAPER, (1,): None})
    schedule = bs.Schedule(bs.HeadGroups(groups), layers=layers)
    written = repr(schedule)
    layers[0] = groups[2,] = PAPER
    assert repr(schedule) == written

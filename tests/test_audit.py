"""Audits: what they estimate, how often their intervals hold, and what happens when a bound is crossed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.check.validators import UserError
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.observe import Audit, AuditedAttention, Crossing, Estimate
from blocksparse.observe.audit import draw, ratio, row_sums
from blocksparse.testing import make_qkv, masked_attention
from tests.kernels.compare import draws
from tests.specs import not_none
from tests.stages import SMALL_BLOCKS
from tests.tiny_model import tiny_llama

RECORDED = Path(__file__).with_name("data") / "audit_rows.npz"
PIPELINES: Mapping[str, AnyPipeline] = {
    **SMALL_BLOCKS,
    "s2o": bs.s2o(),
    "mean_correction": bs.mean_pooling(0.4, block=32, executor=bs.MeanCorrectionExecutor(bs.ReferenceExecutor())),
}


@final
@frozen(eq=False)
class Without(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A planted fault: one column of blocks is dropped where a row does not need it for itself."""

    column: int

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        keep = bs.Everything()(scores).keep.clone()
        keep[..., self.column] &= scores.grid.diagonal[..., self.column]
        return bs.BlockMask(keep, scores.grid)


def without(column: int) -> AnyPipeline:
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), Without(column), bs.ReferenceExecutor())


def figures(sums: Tensor) -> tuple[float, float]:
    """Covered mass and error of `[4, rows]`."""
    covered, draws, distance, norm = sums.sum(1).tolist()
    return covered / draws, distance / norm


def true_figures(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """By the definition, in float64: each query's own keys, one softmax, nothing sampled."""
    trace = pipeline.trace(q, k, v)
    pairs = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    dense = masked_attention(q.double(), k.double(), v.double(), pairs, q.shape[-1] ** -0.5)
    distance = (trace.output.out.double() - dense).abs().sum()
    return float(trace.covered_mass().mean()), float(distance / dense.abs().sum())


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("M", "N"), [(300, 300), (100, 300)])
def test_all_rows_give_the_truth(name: str, M: int, N: int) -> None:
    q, k, v = make_qkv(B=2, M=M, N=N, D=16)
    sums = row_sums(PIPELINES[name].trace(q, k, v), M, draws())
    assert figures(sums) == pytest.approx(true_figures(PIPELINES[name], q, k, v), rel=1e-4, abs=1e-6)
    assert sums[1].tolist() == [2 * 4] * M


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_no_error_of_its_own(dtype: torch.dtype) -> None:
    """Of a call that keeps everything, the output's own rounding is all that is left."""
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), bs.Everything(), bs.ReferenceExecutor())
    q, k, v = make_qkv(N=500, D=32, dtype=dtype)
    mass, error = figures(row_sums(pipeline.trace(q, k, v), 500, draws()))
    assert mass == pytest.approx(1, abs=1e-5)
    assert error == pytest.approx(true_figures(pipeline, q, k, v)[1], rel=0.02)
    assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize(("M", "rows"), [(100, 16), (64, 64), (50, 16), (10, 16)])
def test_every_query_is_drawn_as_often_as_every_other(M: int, rows: int) -> None:
    drawn = draw(50, 40, M, rows, draws())
    assert drawn.shape == (50, 40, rows)
    assert (drawn.diff() >= 0).all()
    counts = drawn.flatten().bincount(minlength=M).double() / (50 * 40)
    expected = rows / M
    assert len(counts) == M
    assert (counts - expected).abs().max() < 6 * (expected / 2000) ** 0.5


@pytest.mark.parametrize("layer", ["xattention_layer_13", "pbs_attn_layer_20", "flex_prefill_layer_0"])
def test_intervals_hold_in_94_of_100_trials_on_recorded_layers(layer: str) -> None:
    """Of every query of 9 heads: covered mass, `sum|o - o'|` and `sum|o'|`, while SmolLM2 read 4096 tokens."""
    recorded = torch.from_numpy(np.load(RECORDED)[layer]).double()  # [3, Hq, M]
    _, H, M = recorded.shape
    random, trials, rows = draws(), 400, 64
    drawn = draw(trials, H, M, rows, random)
    sums = torch.stack([x.expand(trials, -1, -1).gather(2, drawn).sum(1) for x in recorded])  # [3, trials, rows]
    truth = recorded[0].mean(), recorded[1].sum() / recorded[2].sum()
    pairs = (sums[0], torch.full((trials, rows), float(H), dtype=torch.float64)), (sums[1], sums[2])
    for true, (top, bottom) in zip(truth, pairs, strict=True):
        found = [ratio(t, b, confidence=0.95) for t, b in zip(top, bottom, strict=True)]
        assert sum(x.low <= true <= x.high for x in found) >= 0.94 * trials
        assert all(x.low <= x.value <= x.high for x in found)
        # An interval that holds everything would say nothing.
        assert np.median([x.high - x.low for x in found]) < 0.75 * min(float(true), 0.1)


@pytest.mark.parametrize(
    ("top", "bottom", "expected"),
    [([1.0] * 16, [2.0] * 16, Estimate(0.5, 0.5, 0.5)), ([0.0] * 16, [0.0] * 16, Estimate(0.0, 0.0, 0.0))],
)
def test_intervals_of_equal_rows_are_points(top: list[float], bottom: list[float], expected: Estimate) -> None:
    assert ratio(torch.tensor(top).double(), torch.tensor(bottom).double(), confidence=0.95) == expected


def test_intervals_of_normal_rows_are_students() -> None:
    """By hand: 16 numbers of mean 0 and standard deviation 1, without skewness; t(0.975, 15) is 2.1314."""
    half = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64) * (15 / 16) ** 0.5
    found = ratio(10 + half, torch.ones(16, dtype=torch.float64), confidence=0.95)
    assert found.value == pytest.approx(10)
    assert (found.low, found.high) == pytest.approx((10 - 2.1314 / 4, 10 + 2.1314 / 4), abs=1e-3)


def called(audit: Audit, pipeline: AnyPipeline | bs.HeadGroups, *, layer: int, times: int = 1) -> list[Tensor]:
    audited = AuditedAttention(pipeline, layer, audit)
    q, k, v = make_qkv(N=300, D=16)
    return [audited(q, k, v) for _ in range(times)]


@pytest.mark.parametrize("every", [1, 4])
def test_one_call_of_every_is_audited_in_each_layer(every: int) -> None:
    audit = Audit(16, every)
    for layer in (0, 3):
        called(audit, PIPELINES["mean_pooling"], layer=layer, times=8)
    assert [(x.layer, x.calls, x.audited) for x in audit.layers()] == [(0, 8, 8 // every), (3, 8, 8 // every)]


def test_audited_calls_are_drawn_at_random() -> None:
    """Or, of prompts in 4 chunks each, always the same chunk would be audited."""
    places = set()
    for seed in range(20):
        audit = Audit(16, 4, seed=seed)
        before = 0
        for place in range(4):
            called(audit, PIPELINES["mean_pooling"], layer=0)
            now = audit.layers()[0].audited
            places |= {place} if now > before else set()
            before = now
    assert places == {0, 1, 2, 3}


def test_outputs_and_torchs_random_numbers_are_as_without_an_audit() -> None:
    q, k, v = make_qkv(N=300, D=16)
    torch.manual_seed(3)
    expected, after = PIPELINES["pbs_attn"](q, k, v), torch.rand(4)
    torch.manual_seed(3)
    (out,) = called(Audit(16, 1), PIPELINES["pbs_attn"], layer=0)
    assert torch.equal(out, expected)
    assert torch.equal(torch.rand(4), after)


def test_the_interval_of_a_layer_narrows_with_its_calls() -> None:
    audit = Audit(16, 1)
    called(audit, PIPELINES["mean_pooling"], layer=0)
    called(audit, PIPELINES["mean_pooling"], layer=1, times=16)
    one, many = (x.error for x in audit.layers())
    assert one is not None
    assert many is not None
    assert many.high - many.low < 0.5 * (one.high - one.low)
    q, k, v = make_qkv(N=300, D=16)
    assert many.low < true_figures(PIPELINES["mean_pooling"], q, k, v)[1] < many.high


def test_chunks_count_by_their_queries() -> None:
    """The same two chunks give one figure, whichever has more rows in the sample: each query counts once."""
    q, k, v = make_qkv(N=320, D=16)
    pipeline = PIPELINES["mean_pooling"]
    audit = Audit(64, 1)
    audited = AuditedAttention(pipeline, 0, audit)
    audited(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    audited(q[:, :, 64:], k, v)
    first, second = (
        true_figures(pipeline, *x)[0] for x in ((q[:, :, :64], k[:, :, :64], v[:, :, :64]), (q[:, :, 64:], k, v))
    )
    found = not_none(audit.layers()[0].covered_mass)
    assert found.low < (64 * first + 256 * second) / 320 < found.high
    assert found.value == pytest.approx((64 * first + 256 * second) / 320, abs=0.02)


def test_a_planted_fault_is_caught() -> None:
    """Layer 1 drops the block that holds the first key, a sink, layer 0 one that nobody looks at much."""
    crossings: list[Crossing] = []
    audit = Audit(64, 1, max_error=0.05, min_mass=0.95, on_crossed=crossings.append)
    called(audit, without(5), layer=0)
    called(audit, without(0), layer=1)
    assert [x.layer for x in crossings] == [1]
    assert crossings[0].error.low > 0.05
    assert [x.crossed for x in audit.layers()] == [0, 1]


def test_after_a_crossing_the_layer_is_dense_until_it_is_resumed() -> None:
    audit = Audit(64, 1, max_error=0.05, fall_back=True)
    first, second = called(audit, without(0), layer=1, times=2)
    q, k, v = make_qkv(N=300, D=16)
    dense = bs.HeadGroups({(0, 1): None})(q, k, v)
    assert not torch.allclose(first, dense, atol=1e-3)
    assert torch.equal(second, dense)
    trace = AuditedAttention(without(0), 1, audit).trace(q, k, v)
    assert torch.equal(trace.density(), torch.ones(1, 4, dtype=torch.float64))
    assert [(x.calls, x.audited, x.dense) for x in audit.layers()] == [(1, 1, True)]
    audit.resume()
    (again,) = called(audit, without(0), layer=1)
    assert torch.equal(again, first)


def test_outputs_that_are_not_finite_cross_every_bound() -> None:
    audit = Audit(16, 1, max_error=1e9)
    q, k, v = make_qkv(N=300, D=16)
    v[0, 0, 3] = float("nan")
    AuditedAttention(PIPELINES["mean_pooling"], 0, audit)(q, k, v)
    assert audit.layers()[0].crossed == 1


def test_dense_heads_and_calls_count_and_are_not_audited() -> None:
    audit = Audit(16, 1)
    called(audit, bs.HeadGroups({(0,): without(0), (1,): None}), layer=0)
    called(audit, bs.HeadGroups({(0,): None, (1,): None}), layer=1)
    called(audit, bs.mean_pooling(1.0), layer=2, times=3)  # every block is kept: there is nothing to compare
    some, *none = audit.layers()
    assert not_none(some.covered_mass).high < 1
    assert [(x.calls, x.audited, x.error) for x in none] == [(1, 0, None), (3, 0, None)]


def test_an_executor_without_lse_is_refused() -> None:
    trace = PIPELINES["mean_pooling"].trace(*make_qkv(N=100, D=16))
    object.__setattr__(trace.output, "lse", None)
    with pytest.raises(ValueError, match="an audit needs an executor that gives lse"):
        row_sums(trace, 16, draws())


def test_the_table_and_prometheus_have_a_line_per_layer() -> None:
    client = pytest.importorskip("prometheus_client")
    audit = Audit(16, 2, max_error=0.01)
    (registry := client.CollectorRegistry(auto_describe=True)).register(audit)
    called(audit, without(0), layer=0, times=4)
    AuditedAttention(without(0), 7, audit)  # makes no call
    heading, line = audit.table().splitlines()
    assert heading.split()[:3] == ["layer", "calls", "audited"]
    assert line.split()[:3] == ["0", "4", "2"]
    assert line.split()[-2:] == ["2", "sparse"]
    (found,) = audit.layers()
    for name, labels, value in (
        ("calls_total", {}, 4), ("audited_total", {}, 2), ("crossed_total", {}, 2), ("dense", {}, 0),
        ("covered_mass", {"of": "low"}, not_none(found.covered_mass).low),
    ):  # fmt: skip
        assert registry.get_sample_value(f"blocksparse_audit_{name}", {"layer": "0", **labels}) == value
    assert b"# TYPE blocksparse_audit_error gauge" in client.generate_latest(registry)


def test_without_a_client_prometheus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(UserError, match="prometheus_client is not installed: pip install prometheus_client"):
        Audit().collect()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rows": 8}, "'rows' must be a whole number, at least 16: 8"),
        ({"every": 0}, "'every' must be a whole number, at least 1: 0"),
        ({"min_mass": 1.5}, "'min_mass' must be a number from 0 to 1, or None: 1.5"),
        ({"max_error": float("nan")}, "'max_error' must be a number, at least 0, or None: nan"),
        ({"confidence": 1}, "'confidence' must be a number from 0.5 to 0.9999: 1"),
        ({"fall_back": True}, "'on_crossed' and 'fall_back' need a bound. Give 'min_mass' or 'max_error'"),
        ({"on_crossed": print}, "need a bound"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Audit(**arguments)


def test_a_model_is_audited_layer_by_layer() -> None:
    """And a layer that crosses a bound attends densely from then on, as its density shows."""
    pytest.importorskip("transformers")
    from blocksparse.hosts.transformers import DensityRecorder, attach

    model = tiny_llama()
    ids = torch.randint(50, (1, 300))
    dense = model(ids).logits
    keeps_all = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), bs.Everything(), bs.ReferenceExecutor())
    few = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(32), bs.TopK(1), bs.ReferenceExecutor())
    schedule, recorder = bs.Schedule(keeps_all, layers={1: few}), DensityRecorder()
    audit = Audit(16, 1, max_error=0.01, fall_back=True)
    with attach(model, schedule, min_tokens=1, recorder=recorder, audit=audit):
        first = model(ids).logits
        recorder.clear()
        second = model(ids).logits
    assert [(x.layer, x.audited, x.dense) for x in audit.layers()] == [(0, 2, False), (1, 1, True)]
    assert not torch.allclose(first, dense, atol=1e-4)
    torch.testing.assert_close(second, dense, atol=1e-5, rtol=1e-4)
    assert recorder.density().tolist() == [[1.0] * 4] * 2
    with pytest.raises(TypeError, match="'audit' must be an Audit, or None: 16"):
        attach(model, schedule, audit=16)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_and_what_is_found_is_the_same() -> None:
    q, k, v = make_qkv(Hq=8, Hkv=2, N=4096, D=64, dtype=torch.bfloat16, device="cuda")
    pipeline = bs.pbs_attn(0.5, executor=bs.TritonExecutor())
    audit = Audit(64, 1, max_error=0.5)
    audited = AuditedAttention(pipeline, 0, audit)
    audited(q, k, v)
    audit.layers()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            audited(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = audit.layers()[0]
    trace = pipeline.trace(q, k, v)
    mass, error = figures(row_sums(trace, 4096, torch.Generator("cuda").manual_seed(0)))
    assert found.audited == 5
    assert found.covered_mass is not None
    assert found.error is not None
    assert found.covered_mass.low <= mass <= found.covered_mass.high
    assert found.error.low <= error <= found.error.high
    assert mass == pytest.approx(float(trace.covered_mass().mean()), abs=1e-3)

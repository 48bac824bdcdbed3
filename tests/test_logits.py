"""Softcap and sinks: a law for every executor that has them, and a plain refusal by the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.audit import Audit, AuditedPipeline
from blocksparse.testing import assert_within_budget, make_qkv

SINKS = torch.tensor([-1.0, 0.5, 2.0, 5.0], dtype=torch.float64)
CHANGES = (bs.Logits(softcap=2.0), bs.Logits(sinks=SINKS), bs.Logits(softcap=1.5, sinks=SINKS))
each_change = pytest.mark.parametrize("change", CHANGES, ids=("softcap", "sinks", "both"))
EXECUTORS: tuple[Any, ...] = (bs.ReferenceExecutor, bs.CpuExecutor)
each_executor = pytest.mark.parametrize("make", EXECUTORS, ids=lambda make: make.__name__)


class SomeRows(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """Every third row keeps nothing, the others two blocks in three."""

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        grid = scores.grid
        row, col = torch.arange(grid.rows)[:, None], torch.arange(grid.cols)
        keep = grid.reachable & (row % 3 != 1) & ((row + col) % 3 != 0)
        return bs.BlockMask(keep.expand(grid.batch, grid.q_heads, -1, -1), grid)


def written_out(trace: bs.Trace[Any, Any, Any], change: bs.Logits, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition, over all pairs at once."""
    q, k, v = (x.to(dtype) for x in (trace.q, trace.k, trace.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    grid = trace.mask.grid
    pairs = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    for row in range(grid.rows):
        index = trace.mask.queries(row).unsqueeze(-1).expand(-1, -1, -1, k.shape[2])
        pairs.scatter_(2, index, trace.mask.pairs(row))
    logits = q @ k.mT * trace.scale
    if change.softcap is not None:
        logits = change.softcap * torch.tanh(logits / change.softcap)
    logits = logits.masked_fill(~pairs, float("-inf"))
    sinks = SINKS if change.sinks is not None else torch.full_like(SINKS, float("-inf"))
    with_sink = torch.cat((logits, sinks.to(dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)), -1)
    return with_sink.softmax(-1).nan_to_num(0.0)[..., :-1] @ v, with_sink.logsumexp(-1)


@each_change
@each_executor
@pytest.mark.parametrize("start", [0, 37])
def test_the_law(make: Callable[..., Any], change: bs.Logits, start: int) -> None:
    q, k, v = make_qkv(N=200, D=16, dtype=torch.float32)
    q = q[:, :, start:] * 4  # logits far beyond the cap
    for permuter in (bs.Identity(), bs.SegmentKeySort(64, probe=16)):
        trace = bs.Pipeline(permuter, bs.NoScorer(16), SomeRows(), make(logits=change)).trace(q, k, v)
        kept = trace.output.out.any(-1)
        assert bool(kept.any() and not kept.all())  # there are queries of both kinds
        assert trace.output.lse is not None
        want, plain = (written_out(trace, change, dtype) for dtype in (torch.float64, torch.float32))
        assert_within_budget(trace.output.out, want[0], plain[0])
        assert_within_budget(trace.output.lse, want[1], plain[1])


@each_change
def test_a_trace_measures_against_dense_attention_with_the_same_logits(change: bs.Logits) -> None:
    q, k, v = make_qkv(N=100, D=16, dtype=torch.float64)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.CpuExecutor(logits=change))
    trace = everything.trace(q, k, v)
    assert float(trace.error().max()) < 1e-13
    plain = attrs.evolve(everything, executor=bs.CpuExecutor())(q, k, v)
    assert float((plain - trace.output.out).abs().max()) > 0.01


def test_they_are_refused_in_one_sentence() -> None:
    q, k, v = make_qkv(N=64, D=16)
    wrong: Any = bs.Logits
    with pytest.raises(ValueError, match="'softcap' must be a number above 0, at most 1e30, or None: 0"):
        bs.Logits(softcap=0)
    with pytest.raises(TypeError, match="'sinks' must be a finite number, or one per query head, or None"):
        wrong(sinks="1.0")
    for make in EXECUTORS:
        with pytest.raises(TypeError, match="'logits' must be a Logits"):
            make(logits=2.0)
        with pytest.raises(ValueError, match="'sinks' has 2 entries for 4 query heads"):
            bs.mean_pooling(executor=make(logits=bs.Logits(sinks=torch.zeros(2))))(q, k, v)
    others: tuple[Any, ...] = (bs.TritonExecutor, bs.GatherExecutor, bs.FlexExecutor, bs.AutoExecutor)
    for other in others:
        with pytest.raises(TypeError, match="unexpected keyword argument 'logits'"):
            other(logits=bs.Logits())


@each_change
def test_an_audit_compares_with_dense_attention_with_the_same_logits(change: bs.Logits) -> None:
    q, k, v = make_qkv(N=100, D=16)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.CpuExecutor(logits=change))
    audit = Audit(rows=100, every=1)
    AuditedPipeline(everything, 0, audit)(q * 4, k, v)
    (layer,) = audit.layers()
    assert layer.covered_mass is not None
    assert layer.error is not None
    assert abs(layer.covered_mass.value - 1) < 1e-5
    assert layer.error.value < 1e-5
    falls_back = AuditedPipeline(everything, 0, Audit(rows=16, every=1, max_error=0.1, fall_back=True))
    with pytest.raises(ValueError, match=r"^'fall_back' attends by a plain softmax, .* say fall_back=False"):
        falls_back(q, k, v)

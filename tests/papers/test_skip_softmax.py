"""Skip-softmax against a reading of its definition, query by query (arXiv 2512.12087)."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from tests.papers.readings import Small, small, some_cases
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv

FACTOR = 6.0


def reading(case: Small, head: int, query: int) -> tuple[Tensor, set[int]]:
    """The output of one query, and the blocks that it did not leave out."""
    keys, at = case.keys[0, head], query + case.offset
    logits = case.scale * keys @ case.q[0, head, query]
    bound, met, kept, left = math.log(FACTOR / len(keys)), -math.inf, list[int](), set[int]()
    for j, col in enumerate(case.cols):
        seen = [i for i in col if not case.causal or i <= at]
        row_start = at // 8 * 8 if case.causal else 0
        whole = len(col) == 8 and (not case.causal or col[-1] <= max(row_start, case.offset))
        best = max((float(logits[i]) for i in seen), default=-math.inf)
        if whole and len(keys) > FACTOR and best - met < bound:
            continue
        met = max(met, best) if whole else met
        kept += seen
        if seen:
            left.add(j)
    weight = logits[kept].softmax(-1)
    return weight @ case.v.repeat_interleave(case.q.shape[1] // case.v.shape[1], 1)[0, head, kept], left


@some_cases
def test_outputs_and_what_was_left_out(cases: range) -> None:
    pipeline = bs.skip_softmax(FACTOR, block=8)
    left_out = 0
    for seed in cases:
        case = small(seed, causal=seed % 3 > 0, most=40)
        case = evolve(case, q=8 * case.q[:, :, -5:])
        trace = pipeline.trace(case.q, case.k, case.v, causal=case.causal)
        visited = torch.zeros_like(trace.visited.keep)
        for head in range(case.q.shape[1]):
            for query in range(case.q.shape[2]):
                out, blocks = reading(case, head, query)
                torch.testing.assert_close(trace.output.out[0, head, query], out, rtol=0, atol=1e-10)
                visited[0, head, (query + case.offset) // 8 - case.offset // 8, sorted(blocks)] = True
        assert torch.equal(trace.visited.keep, visited)
        left_out += int((trace.mask.keep & ~visited).sum())
    assert left_out > len(cases) // 4


def test_a_short_prompt_is_attended_exactly() -> None:
    case = small(5, causal=True, N=50)
    trace = bs.skip_softmax(50.0, block=8).trace(case.q, case.k, case.v)
    dense = bs.ReferenceExecutor()(case.q, case.k, case.v, trace.mask, trace.spec)
    torch.testing.assert_close(trace.output.out, dense.out)
    assert trace.output.lse is not None
    assert dense.lse is not None
    torch.testing.assert_close(trace.output.lse, dense.lse)
    assert trace.visited is trace.mask


def test_no_query_leaves_out_logits_that_are_nan() -> None:
    q, k, v = make_qkv(N=40, D=8, dtype=torch.float64)
    k[:, :, 8:16] = float("nan")
    trace = bs.skip_softmax(FACTOR, block=8).trace(q, k, v)
    assert bool(trace.visited.keep[:, :, 1:, 1].all())


def test_a_layers_window_softcap_and_sinks() -> None:
    """With nothing left out it is the reference, whatever a layer asks for."""
    case = small(7, causal=True, N=50)
    asked: bs.AttentionOptions = {"window": 20, "softcap": 3.0, "sinks": 0.5}
    trace = bs.skip_softmax(1e-30, block=8).trace(case.q, case.k, case.v, **asked)
    want = bs.ReferenceExecutor()(case.q, case.k, case.v, trace.mask, trace.spec)
    torch.testing.assert_close(trace.output.out, want.out)
    torch.testing.assert_close(trace.output.lse, want.lse)


def test_the_kernel_leaves_out_the_same(device: str) -> None:
    """On a GPU the portable kernel does it; here its threshold is what it is given."""
    executor = bs.SkipSoftmaxExecutor(1000.0)
    assert executor.threshold(1000) is None
    assert executor.threshold(8000) == pytest.approx(math.log(1 / 8))
    if device == "cpu":
        pytest.skip("no GPU here")
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 64, generator=generator, device=device).half() for _ in range(3))
    pipeline = bs.skip_softmax(32.0, block=64)
    there = pipeline.trace(3 * q, k, v)
    here = pipeline.trace(3 * q.cpu().float(), k.cpu().float(), v.cpu().float())
    torch.testing.assert_close(there.output.out.cpu().float(), here.output.out, rtol=1e-2, atol=1e-2)
    assert float(there.density().mean()) <= 1.0


def test_the_factor_of_a_checkpoint() -> None:
    written = {
        "sparse_attention_config": {
            "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["Attention"]}},
            "threshold_scale_factor": {"formula": "a * exp(b * target_sparsity)", "prefill": {"a": 7.9, "b": 8.6}},
            "target_sparse_ratio": {"prefill": 0.4, "decode": 0.5},
        }
    }
    config: Any = json.loads(json.dumps(written))
    read = bs.SkipSoftmaxExecutor.calibrated
    assert read(config).scale_factor == pytest.approx(7.9 * math.exp(8.6 * 0.4))
    assert read(SimpleNamespace(**config), 0.9).scale_factor == pytest.approx(7.9 * math.exp(8.6 * 0.9))
    del config["sparse_attention_config"]["threshold_scale_factor"]["prefill"]
    others: tuple[object, ...] = config, {}, SimpleNamespace()
    for wrong in others:
        with pytest.raises(ValueError, match="'config' must have sparse_attention_config"):
            read(wrong)
    with pytest.raises(ValueError, match="'scale_factor' belongs to the executor"):
        bs.skip_softmax(5.0, executor=bs.SkipSoftmaxExecutor(5.0))


@pytest.mark.parametrize(("q_block", "k_block", "M"), [(128, 128, 500), (64, 32, 300), (48, 96, 77)])
def test_a_cpus_compiled_kernel_leaves_out_the_same(
    q_block: int, k_block: int, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of one row leave out different blocks, and a layer's softcap, sinks and window count.

    What all of them leave out is not visited.
    """
    q, k, v = make_qkv(B=2, N=500, M=M, Hq=4, Hkv=2, D=32)
    q = 6 * q
    k[:, 0, 128:384] *= 0.01  # what all queries of a row leave out
    executor, left = bs.SkipSoftmaxExecutor(50.0), "blocksparse.execute.skip_softmax.cpu_kernel_refuses"
    pipeline = bs.Pipeline(bs.Identity(), bs.NoScorer(q_block, k_block=k_block), bs.Everything(), executor)
    asked: list[bs.AttentionOptions] = [{}, {"softcap": 50.0, "sinks": 0.5, "window": 450}, {"causal": False}]
    for more in asked:
        with monkeypatch.context() as plain:
            plain.setattr(left, lambda *_: ["it is not asked"])
            want = pipeline.trace(q, k, v, **more)
        trace = pipeline.trace(q, k, v, **more)
        dense = bs.ReferenceExecutor()(q, k, v, trace.mask, trace.spec)
        torch.testing.assert_close(trace.output.out, want.output.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trace.output.lse, want.output.lse, rtol=1e-5, atol=1e-5)
        assert torch.equal(trace.visited.keep, want.visited.keep)
        assert not torch.equal(trace.visited.keep, trace.mask.per_query_head())
        assert float((trace.output.out - dense.out).abs().max()) > 1e-3

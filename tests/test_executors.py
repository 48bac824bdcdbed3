"""Which executor runs, and what they hand to others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import blocksparse as bs
from blocksparse.executors import flex
from blocksparse.testing import make_qkv
from tests.machine import needs_gpu, needs_hopper


def test_auto_takes_flex_on_a_cpu_with_a_compiler() -> None:
    q, k, v = make_qkv(N=64, D=16)
    trace = bs.pbs_attn(executor=bs.ReferenceExecutor()).trace(q, k, v)
    assert str(bs.AutoExecutor().choose(q, k, v, trace.mask)) == "FlexExecutor runs"


def test_auto_says_why_it_takes_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flex, "compiler", lambda: None)
    q, k, v = make_qkv(N=64, D=16)
    with caplog.at_level(logging.WARNING, logger="blocksparse"):
        out = bs.pbs_attn()(q, k, v)
    assert "ReferenceExecutor runs; FlexExecutor cannot:" in caplog.text
    assert "no C++ compiler is found" in caplog.text
    assert torch.equal(out, bs.pbs_attn(executor=bs.ReferenceExecutor())(q, k, v))
    with pytest.raises(ValueError, match=r"no C\+\+ compiler is found.*Use ReferenceExecutor\(\)"):
        bs.pbs_attn(executor=bs.FlexExecutor())(q, k, v)


def test_auto_says_why_it_does_not_take_float64_elsewhere() -> None:
    q, k, v = make_qkv(N=64, D=16, dtype=torch.float64)
    trace = bs.pbs_attn(executor=bs.ReferenceExecutor()).trace(q, k, v)
    choice = bs.AutoExecutor().choose(q, k, v, trace.mask)
    assert choice.refused == {
        "FlexExecutor": ["FlexAttention takes float16, bfloat16 and float32, not torch.float64"]
    }


@needs_gpu
def test_auto_takes_triton_on_a_gpu() -> None:
    q, k, v = make_qkv(N=64, D=16, device="cuda")
    trace = bs.pbs_attn(executor=bs.ReferenceExecutor()).trace(q, k, v)
    assert str(bs.AutoExecutor(dense_below=0).choose(q, k, v, trace.mask)) == "TritonExecutor runs"
    assert str(bs.AutoExecutor().choose(q, k, v, trace.mask)).startswith("dense attention runs: on a GPU")


@needs_hopper
def test_auto_rounds_on_hopper_if_told_to() -> None:
    q, k, v = make_qkv(N=300, D=64, dtype=torch.bfloat16, device="cuda")
    mask = bs.mean_pooling(executor=bs.ReferenceExecutor()).trace(q, k, v).mask
    executor = bs.AutoExecutor(dense_below=0, int8_from=300)
    assert str(executor.choose(q, k, v, mask)) == "Int8Executor runs"
    assert str(executor.choose(q, k[:, :, :299], v, mask)) == "TritonExecutor runs"


@pytest.mark.parametrize("start", [0, 37])
def test_plan_round_trips_through_flex(start: int) -> None:
    """Our lists are FlexAttention's, and its own dense view agrees."""
    q, k, v = make_qkv(N=200, D=16)
    trace = bs.pbs_attn(0.5, block=16, S=64, executor=bs.ReferenceExecutor()).trace(q[:, :, start:], k, v)
    block_mask = flex.to_flex(trace.mask)
    assert torch.equal(block_mask.to_dense().bool(), trace.mask.keep)
    plan = flex.plan_from_flex(block_mask)
    assert plan.index.dtype == bs.BlockPlan.of(trace.mask).index.dtype
    assert torch.equal(plan.to_dense(), trace.mask.keep)


def test_flex_mask_is_right_even_uncompiled() -> None:
    """Uncompiled FlexAttention looks at `mask_mod` alone, so that must say everything."""
    q, k, v = make_qkv(N=100, Hq=2, Hkv=2, D=16)
    trace = bs.pbs_attn(0.5, block=16, S=32, executor=bs.ReferenceExecutor()).trace(q, k, v)
    keys, values = trace.permutation.gather_keys(k), trace.permutation.gather_keys(v)
    with pytest.warns(UserWarning, match="without torch.compile"):
        out = flex_attention(q, keys, values, block_mask=flex.to_flex(trace.mask))
    torch.testing.assert_close(out, trace.output.out)
    assert float(trace.density().mean()) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_memory_stays_with_kept_blocks(dtype: torch.dtype) -> None:
    """A row gathers the keys it keeps, not all of them: 4 blocks of 512 keys, never all 16384."""
    q, k, v = make_qkv(N=16384, Hq=1, Hkv=1, D=8, dtype=dtype)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(512), bs.TopK(4), bs.ReferenceExecutor())
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    front = pipeline.trace(q[:, :, :512], k[:, :, :512], v[:, :, :512])
    assert front.output.out.dtype == dtype
    scores = pipeline.scorer(q, k, bs.GlobalPermutation(), causal=True, scale=0.3)
    mask = pipeline.selector(scores)
    with Watch():  # type: ignore[no-untyped-call]
        bs.ReferenceExecutor()(q, k, v, bs.GlobalPermutation(), mask, scale=0.3)
    assert largest <= 512 * 4 * 512 * 8  # one row of logits against kept keys (or its int64 index), in bytes

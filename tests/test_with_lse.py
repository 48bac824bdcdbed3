"""`Pipeline.with_lse` gives what a plain call gives, and an lse by which outputs can be merged."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.machine import needs_gpu
from tests.meaning import assert_same_bits
from tests.stages import ByReference

PIPELINE = bs.pbs_attn(0.8, block=16, S=32)


def test_out_is_that_of_a_call_and_lse_that_of_the_mask() -> None:
    q, k, v = make_qkv(M=75)
    output, trace = PIPELINE.with_lse(q, k, v, scale=0.2), PIPELINE.trace(q, k, v, scale=0.2)
    assert torch.equal(output.out, PIPELINE(q, k, v, scale=0.2))
    assert output.lse is not None
    logits = q.double() @ k.double().repeat_interleave(2, dim=1).mT * 0.2
    for row in range(trace.mask.grid.rows):
        query, pairs = trace.mask.queries(row), trace.mask.pairs(row)
        want = logits.gather(2, query.unsqueeze(-1).expand(*query.shape, 200))
        want = want.masked_fill(~pairs, float("-inf")).logsumexp(-1)
        torch.testing.assert_close(output.lse.gather(2, query).double(), want, atol=1e-5, rtol=0)


def test_halves_of_the_keys_merge() -> None:
    q, k, v = make_qkv(N=128, M=64)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.CpuExecutor())
    whole = everything.with_lse(q, k, v, causal=False)
    parts = [everything.with_lse(q, k[:, :, s], v[:, :, s], causal=False) for s in (slice(64), slice(64, 128))]
    lse = torch.stack([part.lse for part in parts if part.lse is not None])
    out = (torch.stack([part.out for part in parts]) * lse.softmax(0).unsqueeze(-1)).sum(0)
    torch.testing.assert_close(out, whole.out)
    torch.testing.assert_close(lse.logsumexp(0), whole.lse)


class Wrapped(ByReference):
    """`CpuExecutor`, but it would have a plain call attend densely, and may leave out the lse."""

    def __init__(self, lse: bool) -> None:
        super().__init__()
        self.lse = lse

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec) -> str | None:
        return "it always is"

    def __call__(self, *given: Any, **more: Any) -> bs.AttentionOutput:
        output = bs.CpuExecutor()(*given, **more)
        return output if self.lse else dataclasses.replace(output, lse=None)


def test_it_is_sparse_where_a_call_would_be_dense() -> None:
    q, k, v = make_qkv()
    dense = attrs.evolve(PIPELINE, executor=Wrapped(lse=True))
    assert not torch.allclose(dense(q, k, v), PIPELINE(q, k, v))
    assert torch.equal(dense.with_lse(q, k, v).out, PIPELINE(q, k, v))


@needs_gpu
def test_short_prompts_are_sparse_on_a_gpu_too() -> None:
    q, k, v = make_qkv(N=1024, device="cuda", dtype=torch.bfloat16)
    pipeline = bs.pbs_attn(0.5)
    assert not torch.allclose(pipeline.with_lse(q, k, v).out, pipeline(q, k, v))


def test_an_executor_without_lse_is_refused() -> None:
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match=r"^Wrapped gives no lse for tensors on cpu\. [^.]*\.$"):
        attrs.evolve(PIPELINE, executor=Wrapped(lse=False)).with_lse(q, k, v)
    with pytest.raises(ValueError, match="at least as many keys as queries"):
        PIPELINE.with_lse(q, k[:, :, :8], v[:, :, :8])


def test_a_negative_scale_and_autocast_change_nothing() -> None:
    q, k, v = make_qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = PIPELINE.with_lse(-q, k, v, scale=-0.125)
    want = PIPELINE.with_lse(q, k, v)
    assert_same_bits(output, want)


@pytest.mark.parametrize("method", ["with_lse", "trace"])
def test_transforms_take_calls_only(method: str) -> None:
    q, k, v = make_qkv(N=32)
    with pytest.raises(ValueError, match=rf"^torch.compile and torch.func take calls of a pipeline, .*'{method}'"):
        torch.vmap(lambda x: getattr(PIPELINE, method)(x[None], k, v))(q)

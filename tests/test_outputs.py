"""Where a call writes its output, and the lse by which outputs can be merged."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

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


CALLS: dict[str, Any] = {
    "pipeline": bs.mean_pooling(block=16, executor=bs.ReferenceExecutor()),
    "permuted": bs.pbs_attn(block=16, S=32, executor=bs.ReferenceExecutor()),
    "auto": bs.auto(),
    "dense": bs.a_shape(sink=16, local=512, block=16),
    "groups": bs.HeadGroups({(0,): bs.mean_pooling(block=16), (1,): None}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_in_a_part_of_a_tensor(name: str) -> None:
    """As in a server, whose tensors of a step hold the tokens of all its requests."""
    q, k, v = make_qkv(Hq=4, Hkv=2, N=100, D=16)
    room = torch.full((130, 4, 16), 7.0)
    out = room[20:120].transpose(0, 1)[None]
    given = CALLS[name](q, k, v, scale=0.3, out=out)
    assert given is out
    assert torch.equal(out, CALLS[name](q, k, v, scale=0.3))
    assert (room[:20] == 7).all()
    assert (room[120:] == 7).all()


def test_with_a_history() -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=100, D=16)
    history, pipeline = bs.KeyHistory(), CALLS["pipeline"]
    out = torch.empty_like(q)
    for rows in (slice(0, 40), slice(40, 100)):
        part = slice(rows.stop)
        pipeline(q[:, :, rows], k[:, :, part], v[:, :, part], history=history, out=out[:, :, rows])
        assert torch.equal(out[:, :, rows], pipeline(q[:, :, rows], k[:, :, part], v[:, :, part]))
    assert history.tokens == 100


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (7, TypeError, "'out' must be a tensor: int"),
        (torch.empty(1, 4, 99, 16), ValueError, "'out' must have the shape (1, 4, 100, 16), on cpu: "),
        (torch.empty(1, 4, 100, 16).half(), TypeError, "'out' must have the dtype of q (torch.float32): "),
        (
            TwoTensor(torch.empty(1, 4, 100, 16), torch.empty(1, 4, 100, 16)),
            TypeError,
            "'out' must be a plain tensor: ",
        ),
        (torch._neg_view(torch.empty(1, 4, 100, 16)), ValueError, "'out' must hold its numbers as they are"),
        (torch.empty(1, 4, 100, 16, requires_grad=True), ValueError, "'out' must not require a gradient. "),
        (
            torch.empty(9999).as_strided((1, 4, 100, 16), (1600, 32, 16, 1)),
            ValueError,
            "'out' must have its last axis",
        ),
    ],
)
@pytest.mark.parametrize("name", ["pipeline", "groups"])
def test_an_output_that_does_not_fit(name: str, out: Any, error: type[Exception], words: str) -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=100, D=16)
    with torch.enable_grad(), pytest.raises(error, match=f"^{re.escape(words)}"):
        CALLS[name](q, k, v, out=out)
    with pytest.raises(ValueError, match=r"^'out' is for one prompt, and 'sequences' are several"):
        CALLS[name](q, k, v, out=torch.empty_like(q), sequences=bs.Sequences.packed([50, 50]))


@pytest.mark.parametrize("name", ["pipeline", "groups"])
def test_an_output_in_the_memory_of_an_input(name: str) -> None:
    """Parts side by side of one tensor are apart, and an output over an input, or over a part of one, is not."""
    room = torch.randn(110, 4, 4, 16)  # per token: queries, keys, values and room for the output
    q, k, v, out = (x.transpose(0, 1)[None] for x in room[:100].unbind(1))
    call = CALLS[name] if name == "pipeline" else bs.HeadGroups({(0, 1, 2, 3): CALLS["pipeline"]})
    assert torch.equal(call(q, k, v, out=out), call(q, k, v))
    shifted = room[10:, 1].transpose(0, 1)[None]
    for into, said in ((q, "q"), (k, "k"), (v, "v"), (shifted, "k")):
        with pytest.raises(ValueError, match=f"^'out' must not share memory with '{said}'"):
            call(q, k, v, out=into)


@pytest.mark.parametrize("name", CALLS)
def test_autograd_sees_that_an_output_was_written(name: str) -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=100, D=16)
    out, weight = torch.ones_like(q), torch.ones(1)
    with torch.enable_grad():
        before = (weight.requires_grad_() * out).sum()
        CALLS[name](q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()

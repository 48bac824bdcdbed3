"""A call writes its output where it is told to, a part of a larger tensor perhaps, and nothing else there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import blocksparse as bs
from blocksparse.testing import make_qkv

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

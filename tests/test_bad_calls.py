"""Generated calls that cannot be: other ranks, sizes, dtypes, layouts and devices, arguments in wrong places."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.test_bad_arguments import sentence

Call = dict[str, Any]
Spoil = Callable[[random.Random, Call], None]


def names(rng: random.Random) -> str:
    return rng.choice("qkv")


def one(change: Callable[[torch.Tensor, random.Random], Any], of: str = "qkv") -> Spoil:
    """Change one of the tensors."""

    def spoil(rng: random.Random, call: Call) -> None:
        name = rng.choice(of)
        call[name] = change(call[name], rng)

    return spoil


def every(change: Callable[[torch.Tensor], Any]) -> Spoil:
    """Change all of the tensors."""
    return lambda _, call: call.update({name: change(call[name]) for name in "qkv"})


def put(**values: Callable[[random.Random], Any]) -> Spoil:
    """Replace arguments."""
    return lambda rng, call: call.update({name: value(rng) for name, value in values.items()})


def swap(order: str) -> Spoil:
    """The tensors in another order."""
    return lambda _, call: call.update(zip("qkv", [call[name] for name in order], strict=True))


def cut(x: torch.Tensor, rng: random.Random, axes: tuple[int, ...]) -> torch.Tensor:
    """One entry fewer along one axis."""
    return x.narrow(axis := rng.choice(axes), 0, x.shape[axis] - 1)


SPOILS: dict[str, Spoil] = {
    "no tensor": one(lambda x, rng: rng.choice([None, 3, "q", x.tolist(), x.numpy(), (x,), np.zeros(3)])),
    "another rank": one(lambda x, rng: rng.choice([x[0], x[0, 0], x[None], x.flatten(), x.sum()])),
    "nothing along an axis": one(lambda x, rng: x.narrow(rng.randrange(4), 0, 0)),
    "whole numbers": one(lambda x, rng: x.to(rng.choice([torch.int8, torch.int64, torch.bool, torch.uint8]))),
    "complex": one(lambda x, _: x.to(torch.complex64)),
    "another batch": one(lambda x, _: torch.cat((x, x))),
    "another dtype": one(lambda x, rng: x.to(rng.choice([torch.float16, torch.float64])), of="qk"),
    "another device": one(lambda x, _: x.to("meta")),
    "heads that do not divide": one(lambda x, _: torch.cat((x, x[:, :1]), 1), of="qk"),
    "another head dim": one(lambda x, _: x[..., :-1], of="qk"),
    "other tokens": one(lambda x, rng: cut(x, rng, (1, 2)), of="v"),
    "a head dim too wide": every(lambda x: x.repeat(1, 1, 1, 33)),
    "more queries than keys": one(lambda x, _: torch.cat((x, x), 2), of="q"),
    "tokens before heads": every(lambda x: x.transpose(1, 2)),
    "k, q, v": swap("kqv"),
    "v, k, q": swap("vkq"),
    "k, v, q": swap("kvq"),
    "waits for a gradient": one(lambda x, _: x.requires_grad_()),
    "causal": put(causal=lambda rng: rng.choice([1, 0, None, "yes", torch.tensor(True), np.bool_(1), []])),
    "scale": put(scale=lambda rng: rng.choice([float("nan"), float("inf"), -float("inf"), "1", True, 1j, [1.0]])),
    "a mask": put(attn_mask=lambda rng: rng.choice([torch.ones(40, 40), True, "causal"])),
    "an argument of others": put(dropout_p=lambda _: 0.1),
    # What follows is refused by the newest checks of inputs.
    "meta": every(lambda x: x.to("meta")),
    "sparse": one(lambda x, _: x.to_sparse()),
    "all sparse": every(lambda x: x.to_sparse()),
    "nested": every(lambda x: torch.nested.as_nested_tensor(list(x))),
    "8-bit floats": every(lambda x: x.to(torch.float8_e4m3fn)),
    "a scale too large": put(scale=lambda rng: rng.choice([10**400, -(10**400), 1e300, -1e300, 1e-300])),
}
CALLED: dict[str, Any] = {
    "pipeline": bs.pbs_attn(block=16, S=32, executor=bs.ReferenceExecutor()),
    "early stop": bs.s2o(S=32, block=16),
    "groups": bs.HeadGroups({(0,): bs.mean_pooling(block=16, executor=bs.ReferenceExecutor()), (1,): None}),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_call_that_cannot_be_is_one_sentence(called: Any, spoil: Spoil) -> None:
    rng = random.Random(0)
    for i in range(6):
        q, k, v = make_qkv(N=40, D=8, Dv=12, seed=i)
        call: Call = {"q": q, "k": k, "v": v}
        spoil(rng, call)
        for run in (called, called.trace):
            with torch.enable_grad(), pytest.raises((TypeError, ValueError)) as error:
                run(call["q"], call["k"], call["v"], **{x: y for x, y in call.items() if x not in "qkv"})
            sentence(error)


PIPELINE, GROUPS = CALLED["pipeline"], CALLED["groups"]


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (lambda q, k, v, more: PIPELINE.choose(q, k, **more), {"sequences": bs.Sequences.packed([20, 20])}),
        (lambda q, k, v, more: PIPELINE.with_lse(q, k, v, **more), {"sequences": bs.Sequences.packed([20, 20])}),
        (lambda q, k, v, more: GROUPS(q, k, v, **more), {"history": bs.KeyHistory()}),
        (lambda q, k, v, more: GROUPS.trace(q, k, v, **more), {"dropout_p": 0.1, "sinks": [0.1] * 4}),
    ],
)
def test_no_argument_is_taken_and_ignored(run: Any, more: Call) -> None:
    with pytest.raises(
        TypeError, match=f"window, softcap, sinks and remaining, but no {next(iter(more))}"
    ) as error:
        run(*make_qkv(N=40, D=8), more)
    sentence(error)


def compiled(run: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="eager")


def vmapped(run: Any) -> Any:
    return lambda *x: torch.vmap(run)(*(each[None] for each in x))


@pytest.mark.parametrize("under", [compiled, vmapped])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("is_causal", False, "but no is_causal"),
        ("causal", 1, "'causal' must be "),
        ("window", 0, "'window' must be a whole number, at least 1, or None: "),
        ("window", 100.7, "'window' must be a whole number, at least 1, or None: "),
        ("window", True, "'window' must be a whole number, at least 1, or None: "),
        ("softcap", 0.0, "'softcap' must be a number from 1e-30 to 1e30, or None: "),
        ("softcap", False, "'softcap' must be a number from 1e-30 to 1e30, or None: "),
        ("sinks", True, "'sinks' must be a number up to 2**100, or -inf for no sink, or one"),
        ("sinks", [0.5, True, 0.5, 0.5], "'sinks' must be a number up to 2**100, or -inf for no sink, or one"),
        ("sinks", torch.zeros(4, requires_grad=True), "that requires grad"),
    ],
)
def test_a_graph_refuses_what_a_call_refuses(under: Any, name: str, value: Any, said: str) -> None:
    """Its node takes numbers, in which a window of 0 is none, and True is 1."""
    q, k, v = make_qkv(N=40, D=8)
    for call in (lambda *x: GROUPS(*x, **{name: value}), under(lambda *x: GROUPS(*x, **{name: value}))):
        with (
            torch.enable_grad(),
            pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported), match=re.escape(said)),
        ):
            call(q, k, v)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^torch\.jit\.trace would keep the blocks of its example"):
        torch.jit.trace(lambda *x: bs.mean_pooling()(*x), tuple(make_qkv()), check_trace=False)


@pytest.mark.parametrize("called", ["pipeline", "groups"])
def test_a_trace_in_a_graph_is_refused(called: str) -> None:
    q, k, v = make_qkv(N=40, D=8)
    traced = torch.compile(CALLED[called].trace, fullgraph=True, backend="eager")
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"not 'trace'\. Leave it out of them"):
        traced(q, k, v)  # type: ignore[no-untyped-call]

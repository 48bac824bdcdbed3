"""`auto` does what it says: one rule for causal calls, another for others, and it says which and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attrs.exceptions import FrozenInstanceError

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests.on_kernels import pretend_gpu

SIZES: dict[str, Any] = {"Hq": 4, "Hkv": 2, "N": 600, "D": 32}


def by_share(alpha: float) -> bs.Pipeline[Any, Any, Any]:
    rule = bs.RowShare(alpha) | bs.Band(128) | bs.LastQueries(128)
    scorer = bs.SampledQueriesScorer(bs.AntidiagonalScorer(8, pattern="sum"), 64, 4)
    return bs.Pipeline(bs.Identity(), scorer, rule, bs.AutoExecutor())


@pytest.mark.parametrize(
    ("quality", "text", "pictures"),
    [
        ("careful", by_share(0.025), bs.sparge()),
        ("balanced", by_share(0.034), bs.sparge(0.95, 0.5)),
        ("fast", by_share(0.066), bs.sparge(0.9, 0.3)),
    ],
)
def test_each_kind_of_call_has_its_own_pipeline(
    quality: bs.Quality, text: bs.Pipeline[Any, Any, Any], pictures: bs.Pipeline[Any, Any, Any]
) -> None:
    q, k, v = make_qkv(**SIZES | {"N": 2000})
    for causal, same in ((True, text), (False, pictures)):
        trace, expected = (p.trace(q, k, v, causal=causal) for p in (bs.auto(quality), same))
        assert torch.equal(trace.mask.keep, expected.mask.keep)
        assert torch.equal(trace.output.out, expected.output.out)


def test_better_qualities_keep_more() -> None:
    q, k, v = make_qkv(**SIZES | {"N": 2000})
    choices = [bs.AutoChoice.of(q, k, v, quality=quality) for quality in ("fast", "balanced", "careful")]
    densities = [choice.density for choice in choices]
    assert densities == sorted(set(densities))


def test_a_choice_says_what_and_why(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    q, k, v = make_qkv(**SIZES)
    text = str(bs.AutoChoice.of(q, k, v))
    assert text.startswith(
        "Pipeline(Identity(), SampledQueriesScorer(AntidiagonalScorer(8, pattern='sum'), 64, 4.0), "
        "RowShare(0.034) | Band(128) | LastQueries(128), AutoExecutor()), because the call is causal"
    )
    assert re.search("; CpuExecutor runs by (the compiled kernel|PyTorch.*)$", text)
    assert str(bs.AutoChoice.of(q, k, v, causal=False)).startswith(
        "sparge(0.95, 0.5), because the call is not causal"
    )
    pretend_gpu(monkeypatch)
    short = bs.AutoChoice.of(*(x.to(device) for x in (q, k, v)))
    assert short.density == 1
    assert str(short).startswith("dense attention runs: little work: ")
    assert "; a longer call takes Pipeline(Identity(), " in str(short)
    with pytest.raises(FrozenInstanceError):
        short.density = 0.5  # type: ignore[misc]


def test_what_it_names_is_what_it_runs() -> None:
    q, k, v = make_qkv(**SIZES)
    for causal in (True, False):
        pipeline = eval(bs.AutoChoice.of(q, k, v, causal=causal, quality="fast").preset, dict(vars(bs)))
        keeps = (p.trace(q, k, v, causal=causal).mask.keep for p in (pipeline, bs.auto("fast")))
        assert torch.equal(*keeps)


def test_pictures_have_their_order() -> None:
    grid = (2, 12, 25)
    q, k, v = make_qkv(**SIZES)
    ordered = bs.auto(order=bs.HilbertOrder(grid))(q, k, v, causal=False)
    assert torch.equal(ordered, bs.sparge(0.95, 0.5, order=bs.HilbertOrder(grid))(q, k, v, causal=False))

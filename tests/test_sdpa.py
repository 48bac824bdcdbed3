"""`scaled_dot_product_attention` in the place of PyTorch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.nn import functional

import blocksparse as bs
from blocksparse.presets import every_preset
from blocksparse.testing import make_qkv
from tests.stages import EXECUTORS, PLAIN

DENSE_LIMIT: bs.Pipeline[Any, Any, Any] = bs.Pipeline(
    bs.Identity(), bs.MeanPoolScorer(16), bs.Everything(), bs.ReferenceExecutor()
)


@pytest.mark.parametrize(
    ("M", "options"),
    [
        (75, {}),
        (20, {}),
        (75, {"is_causal": True}),
        (75, {"is_causal": True, "scale": 0.3}),
        (75, {"enable_gqa": True}),
    ],
)
def test_it_is_pytorchs_in_the_dense_limit(M: int, options: dict[str, Any]) -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2 if options.get("enable_gqa") else 4, N=75, M=M, D=16)
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    for pipeline in (DENSE_LIMIT, bs.HeadGroups({tuple(range(k.shape[1])): DENSE_LIMIT})):
        out = bs.scaled_dot_product_attention(q, k, v, **options, pipeline=pipeline)
        assert torch.allclose(out, expected, atol=1e-6)
    causal = options.pop("is_causal", False)
    options.pop("enable_gqa", None)
    sparse = bs.scaled_dot_product_attention(
        q, k, v, None, 0.0, causal, enable_gqa=True, pipeline=PLAIN, **options
    )
    assert torch.equal(sparse, PLAIN(q, k, v, causal=causal, **options))
    assert not torch.allclose(sparse, expected, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch_gives_an_empty_result(causal: bool) -> None:
    q, k, v = (x[:0] for x in make_qkv(Hq=4, Hkv=4, N=75, D=16, Dv=8))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert expected.shape == (0, 4, 75, 8)
    pipelines: list[Any] = [
        evolve(PLAIN, selector=bs.Ranked(PLAIN.selector), executor=executor) for executor in EXECUTORS
    ]
    pipelines.append(bs.HeadGroups({(0, 1): PLAIN, (2, 3): None}))
    for pipeline in (*pipelines, *(preset() for preset in every_preset.values())):
        assert torch.equal(bs.scaled_dot_product_attention(q, k, v, is_causal=causal, pipeline=pipeline), expected)
        assert torch.equal(pipeline(q, k, v, causal=causal), expected)
    assert PLAIN(q, k, v, out=expected) is expected
    for part in ("choose", "trace", "with_lse"):
        with pytest.raises(ValueError, match=r"'q' has an empty batch, \(0, 4, 75, 16\), of which no stage"):
            getattr(PLAIN, part)(q, k, v)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"attn_mask": torch.ones(75, 75, dtype=torch.bool)},
            ValueError,
            r"'attn_mask' must be None, .*\[75, 75\].*Sequences\.padded.*Sequences\.packed.*window=tokens",
        ),
        ({"dropout_p": 0.1}, ValueError, "'dropout_p' must be 0, .*: 0.1"),
        ({"pipeline": functional.scaled_dot_product_attention}, TypeError, "'pipeline' must be a Pipeline or"),
        ({"is_causal": 1}, TypeError, "'is_causal' must be True or False: 1"),
        ({"enable_gqa": False}, ValueError, "'enable_gqa' must be True for 4 heads of queries and 2 of keys"),
        ({"query": None}, TypeError, "'query' must be a Tensor: None"),
        ({"query": torch.zeros(4, 75, 16)}, ValueError, r"must have the shape \[B, H, N, D\]: \(4, 75, 16\)"),
        (
            {"query": torch.zeros(1, 4, 9, 16), "is_causal": True},
            ValueError,
            "as many queries as keys here: 9 and 75",
        ),
        ({"query": torch.zeros(1, 4, 75, 16, requires_grad=True)}, ValueError, "grad"),
    ],
)
def test_what_a_pipeline_cannot_honour_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=75, D=16)
    arguments: dict[str, Any] = {
        "query": q, "key": k, "value": v, "enable_gqa": True, "pipeline": PLAIN, **options
    }  # fmt: skip
    with torch.enable_grad(), pytest.raises(error, match=message):
        bs.scaled_dot_product_attention(**arguments)


def test_a_pipeline_must_be_named() -> None:
    q, k, v = make_qkv(N=32, D=16)
    with pytest.raises(TypeError, match="pipeline"):
        bs.scaled_dot_product_attention(q, k, v)  # type: ignore[call-arg]


def test_torch_compile_keeps_it_in_one_graph() -> None:
    q, k, v = make_qkv(Hq=4, Hkv=2, N=75, D=16)
    call = partial(bs.scaled_dot_product_attention, is_causal=True, enable_gqa=True, pipeline=PLAIN)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))
    assert compiled(q[:0], k[:0], v[:0]).shape == (0, 4, 75, 16)

"""Importance of keys against the reference in float64; at most twice the error of the same-precision torch, and a rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.order import segments_triton as kernels
from blocksparse.kernels.order.segments import key_importance
from blocksparse.kernels.order.segments_triton import key_importance_triton
from blocksparse.testing import make_qkv


def check(q: Tensor, k: Tensor, *, last_q: int = 128, seen: int | None = None, scale: float | None = None) -> None:
    seen, scale = k.shape[2] if seen is None else seen, q.shape[-1] ** -0.5 if scale is None else scale
    for causal, per_query_head in ((True, False), (False, True)):
        rest: tuple[Any, ...] = (last_q, seen, causal, scale, per_query_head)
        exact = key_importance.reference(q.double(), k.double(), *rest).sum(2)
        same = key_importance.reference(q, k, *rest).sum(2).double()
        got = key_importance_triton(q, k, *rest).sum(2)
        assert got.dtype == torch.float32
        budget = 2 * float((same - exact).abs().max()) + 4e-6 * float(exact.abs().max())
        assert float((got.double() - exact).abs().max()) <= budget
        assert bool((got[..., seen:] == 0).all())


def inputs(device: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    q, k, _ = make_qkv(**sizes)
    return q.to(device), k.to(device)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, where the first peak is left behind
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        *(({"N": N}, {}) for N in (1, 63, 65, 127, 129, 200, 1000)),
        ({"M": 5, "N": 130, "Hkv": 2}, {}),
        ({"M": 64, "N": 200, "Hkv": 2}, {"last_q": 20}),
        ({"N": 200, "Hkv": 2}, {"last_q": 150}),
        ({"N": 100, "Hkv": 2}, {"last_q": 1}),
        *(({"N": 200}, {"last_q": 16, "seen": seen}) for seen in (1, 64, 130, 192)),  # nobody votes on the others
        *(({"N": 200}, {"last_q": 16, "scale": scale}) for scale in (0.0, -0.3, 8.0)),
        *(
            pytest.param({"B": 2, "Hq": 2 * group, "Hkv": 2, "N": 70}, {"last_q": 16}, marks=pytest.mark.slow)
            for group in (1, 3, 4, 7)
        ),
    ],
    ids=str,
)
def test_sizes_and_what_is_asked(sizes: dict[str, int], asked: dict[str, Any], device: str) -> None:
    check(*inputs(device, **{"Hq": 2, "Hkv": 1, "D": 16, **sizes}), **asked)


@pytest.mark.slow
@pytest.mark.parametrize("D", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims(D: int, dtype: torch.dtype, device: str) -> None:
    q, k = inputs(device, Hq=1, Hkv=1, N=150, D=D)
    check(q.to(dtype), k.to(dtype), last_q=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    """Nor is it multiplied in it, which takes a CPU without such products ten times as long."""
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=70, D=16)
    q, k = q.to(dtype), k.to(dtype)
    rest: tuple[Any, ...] = (16, 70, True, 0.25, False)
    assert torch.equal(
        key_importance.reference(q, k, *rest), key_importance.reference(q.float(), k.float(), *rest)
    )


def test_many_shares_of_the_keys(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Also one in which some queries see no key at all."""
    monkeypatch.setattr(kernels, "_PIECES", 1)
    check(*inputs(device, Hq=2, Hkv=1, N=330, D=16), last_q=128)
    check(*inputs(device, Hq=2, Hkv=1, N=330, D=16), last_q=128, seen=100)


def test_layouts(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed."""
    q, k = inputs(device, B=2, Hq=4, Hkv=2, N=100, D=16)
    rest: tuple[Any, ...] = (32, 100, True, 0.25, False)
    expected = key_importance_triton(q, k, *rest)
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    last_axis_apart = [x.mT.contiguous().mT for x in (q, k)]
    for a, b in (heads_last, last_axis_apart):
        assert torch.equal(key_importance_triton(a, b, *rest), expected)


def test_equal_keys_weigh_the_same(device: str) -> None:
    """In whatever tile or share of the keys they stand, so that ties stay ties."""
    q, k = inputs(device, Hq=2, Hkv=1, N=1000, D=16)
    k = k[:, :, :1].expand_as(k)
    weight = key_importance_triton(q, k, 16, 1000, False, 0.25, False)
    assert bool((weight == weight[..., :1]).all())

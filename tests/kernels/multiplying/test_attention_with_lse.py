"""Attention with its lse, by the flash kernel on a CPU and by plain products elsewhere, against its meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.multiplying.attention_with_lse import PLACES, attention_with_lse

NOTHING = float("-inf")


def drawn(M: int, keys: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (M, 16), (keys, 16), (keys, 24)
    return [torch.randn(2, 3, *size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]


def meant(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, with a scale of 0.3."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = q @ k.mT * 0.3
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()).masked_fill(hidden, NOTHING)
    return logits.softmax(-1).nan_to_num(0.0) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("M", "keys"), [(1, 1), (7, 40), (PLACES + 3, 20)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("what", ["all", "causal", "some"])
def test_meaning(M: int, keys: int, softcap: float | None, what: str, dtype: torch.dtype, device: str) -> None:
    q, k, v = drawn(M, M if what == "causal" else keys, dtype, device)
    hidden = torch.zeros(2, 1, M, k.shape[2], dtype=torch.bool, device=device)
    options: dict[str, Any] = {"causal": True} if what == "causal" else {}
    if what == "causal":
        hidden |= torch.ones_like(hidden).triu(1)
    elif what == "some":
        hidden |= (torch.rand(hidden.shape, generator=torch.Generator().manual_seed(1)) < 0.4).to(device)
        hidden[1, :, 0] = True  # a query that sees nothing
        options = {"hidden": hidden}
    out, lse = attention_with_lse(q, k, v, 0.3, softcap=softcap, **options)
    want, want_lse = meant(q, k, v, hidden, softcap)
    near = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out.double(), want, rtol=near, atol=near)
    torch.testing.assert_close(lse.double(), want_lse, rtol=near, atol=near)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hidden_key_has_no_influence(value: float, device: str) -> None:
    q, k, v = drawn(5, 8, torch.float32, device)
    hidden = torch.zeros(1, 1, 5, 8, dtype=torch.bool, device=device)
    hidden[..., 3] = True
    want, want_lse = attention_with_lse(q, k, v, 0.3, hidden=hidden)
    k[:, :, 3] = value
    out, lse = attention_with_lse(q, k, v, 0.3, hidden=hidden)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)

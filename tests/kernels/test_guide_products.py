"""Products of queries with one vector per KV head, within the budget of fp32 sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.guide_products import guide_products_reference
from blocksparse.kernels.guide_products_triton import guide_products_triton
from blocksparse.testing import make_qkv


def check(q: Tensor, guide: Tensor) -> None:
    exact = guide_products_reference(q.double(), guide.double())
    same = guide_products_reference(q, guide).double()
    got = guide_products_triton(q, guide)
    assert got.dtype == torch.float32
    budget = 2 * float((same - exact).abs().max()) + 4e-6 * float(exact.abs().max())
    assert float((got.double() - exact).abs().max()) <= budget


@pytest.mark.parametrize("M", [1, 63, 65, 200])
@pytest.mark.parametrize("group", [1, 3])
def test_lengths_and_groups(M: int, group: int, device: str) -> None:
    q, k, _ = make_qkv(B=2, Hq=2 * group, Hkv=2, N=M, D=16)
    check(q.to(device), k.mean(2).to(device))


@pytest.mark.parametrize("D", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims_and_layouts(D: int, dtype: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=70, D=D)
    q, guide = q.to(device, dtype), k.mean(2).to(device)
    check(q, guide)
    want = guide_products_triton(q, guide)
    for other in (q.transpose(1, 2).contiguous().transpose(1, 2), q.mT.contiguous().mT):
        assert torch.equal(guide_products_triton(other, guide), want)

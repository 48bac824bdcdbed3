"""Mean queries of segments, and products with one vector per KV head, within the budget of fp32 sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.order.coarse_order import mean_and_products
from blocksparse.kernels.order.coarse_order_triton import mean_and_products_triton
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.testing import make_qkv


def check(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> None:
    exact = mean_and_products.reference(q.double(), guide.double(), S, lead)
    same = mean_and_products.reference(q, guide, S, lead)
    got = mean_and_products_triton(q, guide, S, lead)
    for x, x_same, x_exact in zip(got, same, exact, strict=True):
        assert x.dtype == torch.float32
        assert x.shape == x_exact.shape
        budget = 2 * float((x_same.double() - x_exact).abs().max()) + 4e-6 * float(x_exact.abs().max())
        assert float((x.double() - x_exact).abs().max()) <= budget


@pytest.mark.parametrize(
    ("M", "S", "lead"),
    [*((M, 64, 0) for M in (1, 63, 65, 200)), *((M, 16, lead) for M in (1, 12, 40) for lead in (1, 5, 15))],
)
@pytest.mark.parametrize("group", [1, 3])
def test_lengths_groups_and_chunks(M: int, S: int, lead: int, group: int, device: str) -> None:
    q, k, _ = make_qkv(B=2, Hq=2 * group, Hkv=2, N=M, D=16)
    check(q.to(device), k.mean(2).to(device), S, lead)


@pytest.mark.slow
@pytest.mark.parametrize(("S", "N"), [(1, 7), (24, 70), (300, 70)])
@pytest.mark.parametrize("D", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims_and_layouts(D: int, S: int, N: int, dtype: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=N, D=D)
    q, guide = q.to(device, dtype), k.mean(2).to(device)
    check(q, guide, S)
    want = mean_and_products_triton(q, guide, S, 0)
    for other in (q.transpose(1, 2).contiguous().transpose(1, 2), q.mT.contiguous().mT):
        for x, y in zip(mean_and_products_triton(other, guide, S, 0), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("D", [16, 128])
def test_bits_do_not_depend_on_what_else_a_call_has(D: int, device: str) -> None:
    """Other segments, and the end of the queries."""
    q, k, _ = make_qkv(Hq=1, Hkv=1, N=210, D=D)
    q, guide = q.to(device), k.mean(2).to(device)
    mean, products = mean_and_products_triton(q, guide, 64, 0)
    for some in (slice(0, 128), slice(64, 210)):
        part, product = mean_and_products_triton(q[:, :, some], guide, 64, 0)
        assert torch.equal(product, products[:, :, some])
        assert torch.equal(part, mean[:, :, some.start // 64 : -(-some.stop // 64)])


def test_the_mean_is_that_of_blocks(device: str) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=100, D=16)
    q, guide = q.to(device), k.mean(2).to(device)
    mean, _ = mean_and_products(q, guide, 32, lead=7)
    torch.testing.assert_close(mean, block_mean(q, 32, lead=7))


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_infinite_and_undefined_queries(device: str) -> None:
    """They spoil their own segment and their own product, and no other."""
    q, k, _ = make_qkv(Hq=1, Hkv=1, N=70, D=16)
    q[0, 0, 3, 2], q[0, 0, 40, 1] = float("nan"), float("inf")
    q, guide = q.to(device), k.mean(2).to(device)
    for got, want in zip(
        mean_and_products_triton(q, guide, 16, 0), mean_and_products.reference(q, guide, 16, 0), strict=True
    ):
        torch.testing.assert_close(got, want, equal_nan=True)

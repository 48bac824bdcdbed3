"""Products of matrices: the kernel for fp32 and plain torch against float64, whatever the shapes and layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import products

pytest.importorskip("triton")
from blocksparse.kernels.gemm.products_triton import products_triton


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def repeated(q: Tensor, k: Tensor) -> Tensor:
    """In float64, with keys repeated."""
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT


@pytest.mark.parametrize(("rows", "cols", "E"), [(1, 70, 16), (65, 1, 80), (33, 70, 130), (2, 3, 1)])
@pytest.mark.parametrize("group", [1, 3])
def test_fp32(rows: int, cols: int, E: int, group: int, device: str) -> None:
    q, k = randn(2, 2 * group, rows, E).to(device), randn(2, 2, cols, E).to(device)
    want = repeated(q, k)
    for compute in (products_triton, products):
        got = compute(q, k)
        assert got.shape == want.shape
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * E**0.5)


def test_layouts(device: str) -> None:
    """Weights times values are products with values turned over."""
    weights, values = randn(1, 4, 20, 30).to(device), randn(1, 2, 30, 16).to(device)
    want = weights.double() @ values.double().repeat_interleave(2, 1)
    for compute in (products_triton, products):
        torch.testing.assert_close(compute(weights, values.mT).double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            compute(weights.mT.contiguous().mT, values.mT).double(), want, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    """Half precision is summed in fp32; products of float64 stay float64."""
    q, k = randn(1, 4, 20, 64).to(device, dtype), randn(1, 2, 30, 64).to(device, dtype)
    want = repeated(q, k)
    got = products(q, k)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    q, k = randn(1, 2, 70, 16).to(device), randn(1, 1, 70, 16).to(device)
    q[0, 0, 3, 2], k[0, 0, 40, 1], k[0, 0, 41, 5] = float("nan"), float("inf"), float("nan")
    want = repeated(q, k).float()
    for compute in (products_triton, products):
        got = compute(q, k)
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()], rtol=1e-5, atol=1e-4)

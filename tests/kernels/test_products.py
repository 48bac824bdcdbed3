"""Products of matrices and of pooled blocks against float64, and cells as tensor descriptors read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import block_products, products
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.kernels.compare import randn, transposed
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.gemm.products_triton import products_triton
from blocksparse.kernels.gemm.strided_products_triton import strided_boxes


def repeated(q: Tensor, k: Tensor) -> Tensor:
    """In float64, with keys repeated."""
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT


@pytest.mark.parametrize(("rows", "cols", "E"), [(1, 70, 16), (65, 1, 80), (33, 70, 130), (2, 3, 1)])
@pytest.mark.parametrize("group", [1, 3])
def test_fp32(rows: int, cols: int, E: int, group: int, device: str) -> None:
    """Also of weights that are turned over, and of values, which are keys turned over."""
    q, k = randn(2, 2 * group, rows, E, device=device), randn(2, 2, cols, E, device=device, seed=1)
    want = repeated(q, k)
    for compute in (products_triton, products):
        for one, other in ((q, k), (transposed(q, 2, 3), transposed(k, 2, 3))):
            got = compute(one, other)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * E**0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    """Half precision is summed in fp32; products of float64 stay float64."""
    q, k = randn(1, 4, 20, 64, device=device, dtype=dtype), randn(1, 2, 30, 64, device=device, dtype=dtype)
    got = products(q, k)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(got.double(), repeated(q, k), rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    q, k = randn(1, 2, 70, 16, device=device), randn(1, 1, 70, 16, device=device, seed=1)
    q[0, 0, 3, 2], k[0, 0, 40, 1], k[0, 0, 41, 5] = float("nan"), float("inf"), float("nan")
    want = repeated(q, k).float()
    for compute in (products_triton, products):
        got = compute(q, k)
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "several tiles"])
def test_blocks_that_a_query_sees(kind: str, device: str) -> None:
    """What no query of a tile may see is left out, and only that."""
    if kind == "several tiles":
        q, k = torch.zeros(1, 2, 4 * 140, 1, device=device), torch.zeros(1, 1, 4 * 140, 1, device=device)
        grid = grid_of(q, k, 4)
    else:
        grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    q, k = randn(B, Hq, rows, 72, device=device), randn(B, 1, cols, 72, device=device, seed=1)
    want = block_products.reference(q.double(), k.double(), grid).float()
    for compute in (block_products.kernel(), block_products):
        both = (x.masked_fill(~grid.visible, 0.0) for x in (compute(q, k, grid), want))
        torch.testing.assert_close(*both, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("N", "slots", "lead"), [(1, 1, 0), (5, 1, 0), (13, 4, 0), (13, 4, 3), (4, 4, 0), (6, 4, 3), (3, 4, 0)]
)
def test_cells_in_descriptors(N: int, slots: int, lead: int, heads: int) -> None:
    """Also of rows that are no multiple of 16 bytes, in memory where they begin at such: axes of one entry have strides too."""
    x = torch.arange(heads * N * 24, dtype=torch.float16).view(1, heads, N, 24)[..., :20]
    descriptor = strided_boxes(x, slots, lead, 128, 32)
    skipped = -lead % slots
    count = (N - skipped) // slots
    if count <= 0:
        assert descriptor is None
        return
    assert descriptor is not None
    cells = [[x[0, h, skipped + c * slots + s] for s in range(slots) for c in range(count)] for h in range(heads)]
    want = torch.stack([torch.stack(rows) for rows in cells]).view(1, heads, slots, count, 20)
    assert torch.equal(descriptor.base, want)

"""Products of pooled blocks: the kernel against float64, wherever a query may see a key."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.gemm.products import block_products
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.gemm.products_triton import block_products_triton


@pytest.mark.parametrize("kind", KINDS)
def test_reachable_blocks(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, Hq, rows, 72, generator=generator).to(device)
    k = torch.randn(B, 1, cols, 72, generator=generator).to(device)
    want = block_products.reference(q.double(), k.double(), grid)
    for compute in (block_products_triton, block_products):
        got = compute(q, k, grid)
        assert got.shape == want.shape
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            *(x.masked_fill(~grid.visible, 0.0) for x in (got, want.float())), rtol=1e-5, atol=1e-4
        )


def test_several_tiles(device: str) -> None:
    """What no query of a tile may see is left out, and only that."""
    q, k = torch.zeros(1, 2, 4 * 140, 1, device=device), torch.zeros(1, 1, 4 * 140, 1, device=device)
    grid = grid_of(q, k, 4)
    generator = torch.Generator().manual_seed(0)
    pooled_q = torch.randn(1, 2, 140, 16, generator=generator).to(device)
    pooled_k = torch.randn(1, 1, 140, 16, generator=generator).to(device)
    want = block_products.reference(pooled_q.double(), pooled_k.double(), grid).float()
    got = block_products_triton(pooled_q, pooled_k, grid)
    torch.testing.assert_close(got.where(grid.visible, 0.0), want.where(grid.visible, 0.0), rtol=1e-5, atol=1e-4)

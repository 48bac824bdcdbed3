"""Cells as tensor descriptors read them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from blocksparse.kernels.gemm.strided_products_triton import strided_boxes


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("N", "slots", "lead"), [(1, 1, 0), (5, 1, 0), (13, 4, 0), (13, 4, 3), (4, 4, 0), (6, 4, 3)]
)
def test_strided_boxes(N: int, slots: int, lead: int, heads: int) -> None:
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


def test_no_whole_cell() -> None:
    assert strided_boxes(torch.zeros(1, 1, 3, 16), 4, 0, 128, 32) is None

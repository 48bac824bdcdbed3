"""Lines that cross blocks: the Triton kernel against the plain torch twin and a loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from blocksparse.kernels.selecting.any_between import any_between, any_between_reference
from blocksparse.kernels.selecting.any_between_triton import any_between_triton


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 1, 1), (50, 9, 300), (200, 70, 5)])
def test_any_between(n: int, rows: int, cols: int, heads: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(2, 3, n, generator=generator) < 0.1
    low = torch.randint(-n, 2 * n, (1, heads, rows, cols), generator=generator).int()
    high = low + torch.randint(-2, 8, low.shape, generator=generator).int()
    each = torch.arange(n).view(-1, 1, 1)
    inside = (each >= low.unsqueeze(2)) & (each <= high.unsqueeze(2))  # [1, heads, n, rows, cols]
    want = (inside & chosen[..., None, None]).any(2)
    assert torch.equal(any_between(chosen, low, high), want)
    count = pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))
    assert torch.equal(any_between_reference(count, low, high), want)
    got = any_between_triton(*(x.to(device) for x in (count, low, high)))
    assert torch.equal(got.cpu(), want)

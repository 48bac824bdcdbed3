"""Hashes of counters: the Triton kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.masks.visibility import counter_hash
from blocksparse.kernels.masks.visibility_triton import counter_hash_triton


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize(("heads", "rows", "cols"), [(1, 1, 1), (3, 70, 33), (2, 5, 1500)])
def test_every_bit(seed: int, heads: int, rows: int, cols: int, device: str) -> None:
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    row = torch.arange(2**32 - rows, 2**32, device=device).unsqueeze(1)
    col = torch.arange(7, 7 + cols, device=device)
    for counters in ((head, row, col), (row, col), (row,), (col,)):
        got = counter_hash_triton(seed, *counters)
        assert torch.equal(got, counter_hash.reference(seed, *counters))

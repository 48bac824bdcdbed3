"""Gated scores: the Triton kernel against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocksparse.kernels.score.block_softmax import gate_blocks
from tests.kernels.block_grids import KINDS, heads_of, make_grid

pytest.importorskip("triton")
from blocksparse.kernels.score.block_softmax_triton import gate_blocks_triton


@pytest.mark.parametrize("with_forced", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_reference(kind: str, with_forced: bool, device: str) -> None:
    grid = make_grid(kind, device)
    B, H, rows, cols = heads_of(grid)
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        x = torch.rand(*shape, generator=generator)
        x.view(-1)[::7] = float("nan")
        x.view(-1)[3::7] = 0.25  # as much as a threshold
        return x.to(device)

    forced = (some(1, H, rows, cols) < 0.3) if with_forced else None
    per_head = torch.rand(1, H, 1, 1, dtype=torch.float64, generator=generator).to(device)
    for heads, theta, more in ((H, 0.25, 0), (1, 0.25, 1), (H, per_head, 0), (1, per_head[:, :1], 0)):
        values = some(B, H, rows, cols + more)[..., :cols]
        of_q, of_k = some(B, H, rows), some(B, heads, cols)
        want, want_forced = gate_blocks.reference(values, of_q, of_k, theta, forced, grid)
        given = values.clone()
        got, got_forced = gate_blocks_triton(values, of_q, of_k, theta, forced, grid)
        same: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(values, given, **same)  # an inner scorer may keep its own
        torch.testing.assert_close(got, want, **same)
        assert torch.equal(got_forced, want_forced)

"""Gated scores: the Triton kernel against the plain torch twin, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.block_grids import KINDS, heads_of, make_grid

from blocksparse.kernels.scoring.gate_blocks import gate_blocks_reference

pytest.importorskip("triton")
from blocksparse.kernels.scoring.gate_blocks_triton import gate_blocks_triton


@pytest.mark.parametrize("with_forced", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_twin(kind: str, with_forced: bool, device: str) -> None:
    """Rows and columns that differ by head or not, NaN among the scores, and scores whose rows are not dense."""
    grid = make_grid(kind, device)
    B, H, rows, cols = heads_of(grid)
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=generator) < 0.3).to(device)

    forced = some(1, H, rows, cols) if with_forced else None
    for shape, more in (((1, 1, 1, cols), 0), ((B, H, 1, cols), 1), ((B, 1, rows, cols), 0)):
        values = torch.rand(B, H, rows, cols + more, generator=generator).to(device)[..., :cols]
        values[0, 0, 0, 0] = float("nan")
        unlike = some(B, H, rows, 1), some(*shape)
        want, want_forced = gate_blocks_reference(values, *unlike, forced, grid)
        given = values.clone()
        got, got_forced = gate_blocks_triton(values, *unlike, forced, grid)
        torch.testing.assert_close(
            values, given, rtol=0, atol=0, equal_nan=True
        )  # an inner scorer may keep its own
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got_forced, want_forced)

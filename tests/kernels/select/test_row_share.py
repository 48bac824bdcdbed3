"""A share of the row's best block or of its mass: the kernel against plain torch; and two masks joined."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept
from blocksparse.kernels.select.top_cdf import MAX_COLS, Of, row_share
from tests.kernels.block_grids import heads_of, make_grid
from tests.kernels.select.test_top_cdf import a_mass, generator, one_row, targets
from tests.on_kernels import pretend_gpu

pytest.importorskip("triton")
from blocksparse.kernels.select.top_cdf_triton import row_share_triton
from blocksparse.kernels.select.top_k_triton import either_triton


@pytest.mark.parametrize("of", ["peak", "row"])
@pytest.mark.parametrize("kind", ["chunk", "sorted", "wide", "per query head", "not causal", "padded"])
def test_kernel_and_reference(kind: str, of: Of, device: str) -> None:
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device).masked_fill(~grid.visible, 7.0)
    values[:, 0, 0] = 0.0
    values[:, 0, 1, 0] = float("nan")
    forced = torch.rand(heads_of(grid), generator=generator()).to(device) < 0.2
    for alpha in (targets([0.3, 0.1, 1.0], device), 0.05):
        for also in (None, forced):
            for always in (NO_BLOCKS, AlwaysKept(near=3, last=2)):
                want = row_share.reference(values, also, alpha, grid, of=of, always=always)
                for compute in (row_share_triton, row_share):
                    assert torch.equal(compute(values, also, alpha, grid, of=of, always=always), want)


def test_share_of_a_row_is_that_of_the_definition(device: str) -> None:
    """With numbers whose sums are exact in fp64, and whatever a row is padded to."""
    values = (torch.rand(1, 1, 1, 300, generator=generator()) ** 8 * 2**20).round().to(device)
    share = values.double() / values.double().sum()
    padded = torch.cat([values, torch.zeros_like(values)], -1)
    for alpha in (0.05, 0.2, 0.4):
        for row, n in ((values, 300), (padded, 600)):
            kept = row_share(row, None, alpha, one_row(n, device), of="row")[..., :299]  # before the diagonal
            want = share[..., :299] * n**0.5 >= torch.tensor(alpha).double()
            assert torch.equal(kept, want)
            assert 0 < kept.sum() < 299


def test_even_rows(device: str) -> None:
    """Each of 64 equal blocks holds 1/64, which is 0.125 / sqrt(64)."""
    grid, values = one_row(64, device), torch.full((1, 1, 1, 64), 0.1, device=device)
    assert row_share(values, None, 0.125, grid, of="row").all()
    assert row_share(values, None, 0.126, grid, of="row").sum() <= 1  # the diagonal


def test_rows_too_long_for_a_program(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(row_share, "kernel", lambda: no_launch)
    for cols in (MAX_COLS, MAX_COLS + 1):
        grid = one_row(cols, device)
        values = torch.rand(1, 1, 1, cols, generator=generator()).to(device)
        if cols <= MAX_COLS:
            with pytest.raises(NotImplementedError):
                row_share(values, None, 0.5, grid, of="peak")
        else:
            want = row_share.reference(values, None, 0.5, grid, of="peak")
            assert torch.equal(row_share(values, None, 0.5, grid, of="peak"), want)


def no_launch(*_: object, **__: object) -> None:
    raise NotImplementedError


def test_either(device: str) -> None:
    one, other = (torch.rand(2, 3, 61, 67, generator=generator()).to(device) < share for share in (0.2, 0.4))
    assert torch.equal(either_triton(one, other), one | other)

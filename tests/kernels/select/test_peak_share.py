"""A share of the row's best block: the kernel against the plain torch twin; and two masks joined."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.select.top_cdf import MAX_COLS, peak_share
from tests.kernels.block_grids import heads_of, make_grid
from tests.kernels.select.test_top_cdf import a_mass, generator, one_row, targets
from tests.on_kernels import pretend_gpu

pytest.importorskip("triton")
from blocksparse.kernels.select.top_cdf_triton import peak_share_triton
from blocksparse.kernels.select.top_k_triton import either_triton


@pytest.mark.parametrize("kind", ["chunk", "sorted", "wide", "per query head", "not causal", "padded"])
def test_kernel_and_twin(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device).masked_fill(~grid.reachable, 7.0)
    values[:, 0, 0] = 0.0
    values[:, 0, 1, 0] = float("nan")
    forced = torch.rand(heads_of(grid), generator=generator()).to(device) < 0.2
    for alpha in ([0.3, 0.1, 1.0], 0.05):
        for also in (None, forced):
            want = peak_share.plain(values, also, targets(alpha, device), grid)
            for compute in (peak_share_triton, peak_share):
                assert torch.equal(compute(values, also, targets(alpha, device), grid), want)


def test_rows_too_long_for_a_program(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(peak_share, "kernel", lambda: no_launch)
    for cols in (MAX_COLS, MAX_COLS + 1):
        grid, alpha = one_row(cols, device), targets(0.5, device)
        values = torch.rand(1, 1, 1, cols, generator=generator()).to(device)
        if cols <= MAX_COLS:
            with pytest.raises(NotImplementedError):
                peak_share(values, None, alpha, grid)
        else:
            assert torch.equal(peak_share(values, None, alpha, grid), peak_share.plain(values, None, alpha, grid))


def no_launch(*_: object) -> None:
    raise NotImplementedError


def test_either(device: str) -> None:
    one, other = (torch.rand(2, 3, 61, 67, generator=generator()).to(device) < share for share in (0.2, 0.4))
    assert torch.equal(either_triton(one, other), one | other)

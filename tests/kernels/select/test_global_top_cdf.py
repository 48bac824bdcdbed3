"""Cumulative selection over whole heads: the search against the sort, block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.common.sizes import HeadMask
from blocksparse.kernels.select.global_top_cdf import global_top_cdf
from tests.kernels.block_grids import heads_of, make_grid
from tests.kernels.select.test_top_cdf import a_mass, generator, targets

pytest.importorskip("triton")
from blocksparse.kernels.select import global_top_cdf_triton as kernels

OTHERS = ("sorted", "wide", "per query head", "not causal", "padded")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_TILE", 128)


def assert_same(values: Tensor, forced: Tensor | None, mass: Tensor, grid: bs.Grid, *, crossing: bool) -> None:
    want = global_top_cdf.reference(values, forced, mass, grid, crossing=crossing)
    for compute in (kernels.global_top_cdf_triton, global_top_cdf):
        assert torch.equal(compute(values, forced, mass, grid, crossing=crossing), want)


@pytest.mark.parametrize("kind", ["chunk", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def test_kernel_and_reference(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device)
    forced = torch.rand(heads_of(grid), generator=generator()).to(device) < 0.2
    # Which block is the last one has nothing to do with how the grid was cut.
    for crossing in (True, False) if kind == "chunk" else (True,):
        assert_same(values, forced, targets([0.3, 0.6, 1.0], device), grid, crossing=crossing)


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [0.0, 1e-7])
def test_ties_and_rounding(sharpness: float, device: str) -> None:
    """Equal blocks are taken by place, over all tiles, and targets that sums meet exactly are met."""
    grid = make_grid("wide", device)
    values = a_mass(grid, sharpness, device)
    assert_same(values, None, targets(0.5, device), grid, crossing=True)
    assert_same(values, None, targets(0.9999999, device), grid, crossing=False)
    assert_same(values.mul(64).round(), values > values.mean(), targets(0.75, device), grid, crossing=True)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-44, 1e30])
def test_any_magnitude(scale: float, device: str) -> None:
    grid = make_grid("in order", device)
    values = a_mass(grid, 2.0, device).double().mul(scale).float()
    assert_same(values, None, targets(0.8, device), grid, crossing=False)


@pytest.mark.slow
def test_bad_numbers_and_what_is_out_of_reach(device: str) -> None:
    grid = make_grid("chunk", device)
    values = a_mass(grid, 2.0, device).masked_fill(~grid.visible, 7.0)
    values[:, 0] = 0.0
    values[:, 1, 0] = float("nan")
    values[:, 1, 1, 0] = -1.0
    values[:, 2, :, 0] = float("inf")
    for crossing in (True, False):
        assert_same(values, None, targets([0.6, 0.9, 1.0], device), grid, crossing=crossing)


def test_heads_that_nobody_asks_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads below the bound have the mask that they have in any case; the others, and those of NaN, are not written."""
    grid = make_grid("chunk", device)
    values = a_mass(grid, 3.0, device)
    B, H = values.shape[:2]
    number = torch.linspace(0.0, 1.0, B * H, device=device).view(B, H)
    number[0, 0] = float("nan")
    bound = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64, device=device)
    asked = number < 0.5
    assert bool(asked.any())
    assert not bool(asked.all())
    want = global_top_cdf.reference(values, None, targets(0.6, device), grid, crossing=True)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    got = kernels.global_top_cdf_triton(
        values, None, targets(0.6, device), grid, crossing=True, heads=HeadMask(number, bound)
    )
    assert torch.equal(got[asked], want[asked])
    assert not bool(got[~asked].any())

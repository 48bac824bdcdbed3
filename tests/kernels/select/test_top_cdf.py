"""Cumulative selection: the search against the sort, block by block."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.select.top_cdf import top_cdf, top_cdf_reference
from blocksparse.testing import make_qkv
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.select.top_cdf_triton import top_cdf_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def a_mass(grid: bs.Grid, sharpness: float, device: str) -> Tensor:
    logits = torch.randn(heads_of(grid), generator=generator()) * sharpness
    return logits.to(device).masked_fill(~grid.visible, float("-inf")).softmax(-1).nan_to_num(nan=0.0)


def targets(value: float | list[float], device: str) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device=device).reshape(1, -1, 1, 1)


def one_row(cols: int, device: str) -> bs.Grid:
    q, k, _ = make_qkv(B=1, Hq=1, Hkv=1, M=16, N=16 * cols, D=16, device=device)
    return grid_of(q, k, 16, causal=False)


def assert_same(
    values: Tensor, forced: Tensor | None, mass: float | Tensor, grid: bs.Grid, *crossings: bool
) -> Tensor:
    for crossing in crossings or (True, False):
        want = top_cdf_reference(values, forced, mass, grid, crossing=crossing)
        for compute in (top_cdf_triton, top_cdf):
            assert torch.equal(compute(values, forced, mass, grid, crossing=crossing), want)
    return want


@pytest.mark.slow
def test_sums_that_fp32_rounds(device: str) -> None:
    """Blocks that differ in their last bit, beside blocks a million times lighter."""
    grid = make_grid("wide", device)
    values = torch.ones(heads_of(grid), device=device).masked_fill(~grid.visible, 0.0)
    values[..., ::2] *= 1 + 2**-23
    values[..., 1::4] *= 2**-20
    for mass in (0.25, 0.5, 0.749999):
        assert_same(values, None, targets(mass, device), grid)


def test_sums_that_equal_the_share(device: str) -> None:
    """Half of the mass is held by half of four equal blocks, with and without the block that crosses."""
    for mass, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)):
        keep = assert_same(torch.ones(1, 1, 1, 4, device=device), None, mass, one_row(4, device))
        assert keep.sum(-1).unique().tolist() == [kept]


def test_sums_beside_the_one_that_rounds_to_the_share(device: str) -> None:
    """Shares are rounded to fp32: a sum one tick below the middle of two numbers rounds to the lower, the mass."""
    first, second, found = 2**29, 3 * 2**27, 0  # weights of 2^29 and more stand for as many ticks
    for third in range(2**26, 2**26 + 2**13, 8):
        total = first + second + third
        mass = float(torch.tensor((first + second) / total, dtype=torch.float64).float())
        above = float(torch.tensor(mass).nextafter(torch.tensor(2.0)))
        missing = (Fraction(mass) + Fraction(above)) / 2 * total - (first + second)
        if 0 < missing < 1:
            found += 1
            values = torch.tensor([first, second, third], dtype=torch.float32, device=device).view(1, 1, 1, 3)
            assert assert_same(values, None, mass, one_row(3, device), False).flatten().tolist() == [
                True,
                True,
                False,
            ]
    assert found


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_reference(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device)
    assert_same(values, None, targets(0.9, device), grid, True)
    forced = torch.rand(heads_of(grid), generator=generator()).to(device) < 0.2
    assert_same(values, forced, targets([0.3, 0.6, 1.0], device), grid)
    assert_same(values, forced[:1, :1], targets(0.7, device), grid, False)


@pytest.mark.slow
@pytest.mark.parametrize("mass", [0.7, 0.9999999999, 1.0, 1])
def test_a_number_for_all_heads(mass: float, device: str) -> None:
    """Rounded to fp32 as a tensor is."""
    grid = make_grid("chunk", device)
    values = a_mass(grid, 3.0, device)
    assert torch.equal(
        assert_same(values, None, mass, grid, False), assert_same(values, None, targets(mass, device), grid, False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [0.0, 1e-7, 30.0])
def test_ties_and_rounding(sharpness: float, device: str) -> None:
    """Equal blocks are taken by column, and targets that sums meet exactly are met."""
    grid = make_grid("wide", device)
    values = a_mass(grid, sharpness, device)
    for mass in (0.5, 0.9999999):
        assert_same(values, None, targets(mass, device), grid)
    assert_same(values.mul(64).round(), values > values.mean(), targets(0.75, device), grid)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e30])
def test_any_magnitude(scale: float, device: str) -> None:
    grid = make_grid("in order", device)
    assert_same(a_mass(grid, 2.0, device).double().mul(scale).float(), None, targets(0.8, device), grid)


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_kept_besides(kind: str, device: str) -> None:
    """The choice itself is the one without them: they take no part in the sums."""
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device)
    rules = (
        (AlwaysKept(near=5), False),
        (AlwaysKept(near=3, first=1, stride=(3, 7)), True),
        (AlwaysKept(near=2, last=9), True),
    )
    for always, crossing in rules:
        alone = top_cdf_reference(values, None, 0.6, grid, crossing=crossing)
        want = keep_visible.reference(alone, grid, always=always, diagonal=True)
        for compute in (top_cdf_triton, top_cdf, top_cdf_reference):
            assert torch.equal(compute(values, None, 0.6, grid, crossing=crossing, always=always), want)


@pytest.mark.parametrize(
    "rule", [bs.Sink(20), bs.Band(9) | bs.Stride(3), bs.Stride(3, released=True), bs.LastKeys(7)]
)
def test_a_union_keeps_what_either_keeps(rule: bs.Selector[Any, bs.BlockMask], device: str) -> None:
    """Whether the rule's numbers go to the launch of `TopCdf`, or its blocks are added afterwards."""
    grid = make_grid("chunk", device)
    scores = bs.BlockMass(a_mass(grid, 3.0, device), grid)
    both = (bs.TopCdf(0.5) | rule)(scores).keep
    assert torch.equal(both, (bs.TopCdf(0.5)(scores) | rule(scores)).keep)


@pytest.mark.slow
def test_rows_of_nothing_and_bad_numbers(device: str) -> None:
    grid = make_grid("in order", device)
    values = a_mass(grid, 2.0, device)
    forced = torch.rand(heads_of(grid), generator=generator()).to(device) < 0.2
    values[:, 0] = 0.0
    values[:, 1] = float("nan")
    values[:, 2, :, ::3] = float("nan")
    values[0, 2, :, 1] = float("inf")
    values[1, 2, :, ::4] = -1.0
    for some in (None, forced, forced | True):
        assert_same(values, some, targets(0.9, device), grid, some is None)
    nothing = assert_same(values, forced, targets(0.9, device), grid, False)[:, :2]
    assert torch.equal(nothing, ((grid.diagonal | forced) & grid.visible)[:, :2])


@pytest.mark.slow
def test_strides_of_scores(device: str) -> None:
    """One number for all blocks, in no memory, and scores laid out by columns."""
    grid = make_grid("sorted", device)
    assert_same(torch.ones((), device=device).expand(heads_of(grid)), None, targets(0.4, device), grid)
    values = a_mass(grid, 2.0, device).mT.contiguous().mT
    forced = torch.rand(2, 3, grid.rows, 1, generator=generator()).to(device) < 0.3
    assert_same(values, forced, targets(0.7, device), grid)


@pytest.mark.slow
@pytest.mark.parametrize("cols", [1000, 2048])
def test_long_rows(cols: int, device: str) -> None:
    q, k = torch.zeros(1, 3, 40, 1, device=device), torch.zeros(1, 1, 4 * cols, 1, device=device)
    grid = grid_of(q, k, 16, 4)
    values = torch.rand(1, 3, grid.rows, grid.cols, generator=generator()).to(device) ** 8
    assert_same(values, None, targets([0.2, 0.9, 0.999], device), grid)

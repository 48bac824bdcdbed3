"""Selections: searches against sorts, block by block and line by line; a kernel takes what its reference takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.common.sizes import HeadMask
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.select.global_top_cdf import global_top_cdf
from blocksparse.kernels.select.top_cdf import MAX_COLS, Of, row_share, top_cdf
from blocksparse.kernels.select.top_k import top_k, visiting_order
from blocksparse.kernels.select.vertical_slash import (
    ChosenRuns,
    fewest,
    heaviest,
    heaviest_of_both,
    running_count,
    vertical_slash_blocks,
)
from blocksparse.testing import make_qkv
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.kernels.compare import assert_same, chosen, draws, randn, transposed
from tests.on_kernels import pretend_gpu
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.select import global_top_cdf_triton
from blocksparse.kernels.select.top_cdf_triton import top_cdf_triton
from blocksparse.kernels.select.top_k_triton import either_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
slow = pytest.mark.slow
OTHERS = ("sorted", "wide", "per query head", "not causal", "padded")


def a_mass(grid: bs.Grid, sharpness: float, device: str) -> Tensor:
    logits = randn(*heads_of(grid), device=device) * sharpness
    return logits.masked_fill(~grid.visible, float("-inf")).softmax(-1).nan_to_num(nan=0.0)


def some_forced(grid: bs.Grid, device: str) -> Tensor:
    return chosen(*heads_of(grid), share=0.2, device=device)


def shares(value: float | list[float], device: str | torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device=device).reshape(1, -1, 1, 1)


def one_row(cols: int, device: str) -> bs.Grid:
    q, k, _ = make_qkv(B=1, Hq=1, Hkv=1, M=16, N=16 * cols, D=16, device=device)
    return grid_of(q, k, 16, causal=False)


# A share of the mass of a row


def assert_top_cdf(
    values: Tensor, forced: Tensor | None, mass: float | Tensor, grid: bs.Grid, *crossings: bool
) -> Tensor:
    for crossing in crossings or (True, False):
        want = top_cdf.reference(values, forced, mass, grid, crossing=crossing)
        for compute in (top_cdf_triton, top_cdf):
            assert torch.equal(compute(values, forced, mass, grid, crossing=crossing), want)
    return want


@slow
def test_sums_that_fp32_rounds(device: str) -> None:
    """Blocks that differ in their last bit, beside blocks a million times lighter."""
    grid = make_grid("wide", device)
    values = torch.ones(heads_of(grid), device=device).masked_fill(~grid.visible, 0.0)
    values[..., ::2] *= 1 + 2**-23
    values[..., 1::4] *= 2**-20
    for mass in (0.25, 0.5, 0.749999):
        assert_top_cdf(values, None, shares(mass, device), grid)


def test_sums_that_equal_the_share(device: str) -> None:
    """Half of the mass is held by half of four equal blocks, with and without the block that crosses."""
    for mass, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)):
        keep = assert_top_cdf(torch.ones(1, 1, 1, 4, device=device), None, mass, one_row(4, device))
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
            keep = assert_top_cdf(values, None, mass, one_row(3, device), False)
            assert keep.flatten().tolist() == [True, True, False]
    assert found


@pytest.mark.parametrize("kind", KINDS)
def test_top_cdf(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    values, forced = a_mass(grid, 3.0, device), some_forced(grid, device)
    assert_top_cdf(values, None, shares(0.9, device), grid, True)
    assert_top_cdf(values, forced, shares([0.3, 0.6, 1.0], device), grid)
    assert_top_cdf(values, forced[:1, :1], shares(0.7, device), grid, False)


@slow
@pytest.mark.parametrize("mass", [0.7, 0.9999999999, 1.0, 1])
def test_a_number_for_all_heads(mass: float, device: str) -> None:
    """Rounded to fp32 as a tensor is."""
    grid = make_grid("chunk", device)
    values = a_mass(grid, 3.0, device)
    one, other = (assert_top_cdf(values, None, x, grid, False) for x in (mass, shares(mass, device)))
    assert torch.equal(one, other)


def assert_global_top_cdf(values: Tensor, forced: Tensor | None, mass: Tensor, grid: bs.Grid) -> None:
    for crossing in (True, False):
        assert_same(global_top_cdf, values, forced, mass, grid, crossing=crossing)


each_rule = pytest.mark.parametrize("assert_right", [assert_top_cdf, assert_global_top_cdf])


@slow
@pytest.mark.usefixtures("several_tiles")
@each_rule
@pytest.mark.parametrize("sharpness", [0.0, 1e-7, 30.0])
def test_ties_and_rounding(sharpness: float, assert_right: Any, device: str) -> None:
    """Equal blocks are taken by place, over all tiles, and targets that sums meet exactly are met."""
    grid = make_grid("wide", device)
    values = a_mass(grid, sharpness, device)
    for mass in (0.5, 0.9999999):
        assert_right(values, None, shares(mass, device), grid)
    assert_right(values.mul(64).round(), values > values.mean(), shares(0.75, device), grid)


@slow
@pytest.mark.usefixtures("several_tiles")
@each_rule
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e30])
def test_any_magnitude(scale: float, assert_right: Any, device: str) -> None:
    grid = make_grid("in order", device)
    assert_right(a_mass(grid, 2.0, device).double().mul(scale).float(), None, shares(0.8, device), grid)


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_kept_besides(kind: str, device: str) -> None:
    """The choice itself is the one without them: they take no part in the sums."""
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device)
    with_stride, with_last = AlwaysKept(near=3, first=1, stride=(3, 7)), AlwaysKept(near=2, last=9)
    for always, crossing in ((AlwaysKept(near=5), False), (with_stride, True), (with_last, True)):
        alone = top_cdf.reference(values, None, 0.6, grid, crossing=crossing)
        want = keep_visible.reference(alone, grid, always=always, diagonal=True)
        for compute in (top_cdf_triton, top_cdf, top_cdf.reference):
            assert torch.equal(compute(values, None, 0.6, grid, crossing=crossing, always=always), want)


@slow
def test_rows_of_nothing_and_bad_numbers(device: str) -> None:
    grid = make_grid("in order", device)
    values, forced = a_mass(grid, 2.0, device), some_forced(grid, device)
    values[:, 0], values[:, 1], values[:, 2, :, ::3] = 0.0, float("nan"), float("nan")
    values[0, 2, :, 1], values[1, 2, :, ::4] = float("inf"), -1.0
    for some in (None, forced, forced | True):
        assert_top_cdf(values, some, shares(0.9, device), grid, some is None)
    nothing = assert_top_cdf(values, forced, shares(0.9, device), grid, False)[:, :2]
    assert torch.equal(nothing, ((grid.diagonal | forced) & grid.visible)[:, :2])


@slow
def test_strides_of_masses(device: str) -> None:
    """One number for all blocks, in no memory, and scores laid out by columns."""
    grid = make_grid("sorted", device)
    assert_top_cdf(torch.ones((), device=device).expand(heads_of(grid)), None, shares(0.4, device), grid)
    forced = chosen(2, 3, grid.rows, 1, share=0.3, device=device)
    assert_top_cdf(transposed(a_mass(grid, 2.0, device), 2, 3), forced, shares(0.7, device), grid)


@slow
@pytest.mark.parametrize("cols", [1000, 2048])
def test_long_rows(cols: int, device: str) -> None:
    q, k = torch.zeros(1, 3, 40, 1, device=device), torch.zeros(1, 1, 4 * cols, 1, device=device)
    grid = grid_of(q, k, 16, 4)
    values = torch.rand(1, 3, grid.rows, grid.cols, generator=draws()).to(device) ** 8
    assert_top_cdf(values, None, shares([0.2, 0.9, 0.999], device), grid)


# A share of the mass of a head


@pytest.fixture
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_top_cdf_triton, "_TILE", 128)


@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("kind", ["chunk", *(pytest.param(x, marks=slow) for x in OTHERS)])
def test_global_top_cdf(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    given = a_mass(grid, 3.0, device), some_forced(grid, device), shares([0.3, 0.6, 1.0], device), grid
    # Which block is the last one has nothing to do with how the grid was cut.
    for crossing in (True, False) if kind == "chunk" else (True,):
        assert_same(global_top_cdf, *given, crossing=crossing)


@slow
@pytest.mark.usefixtures("several_tiles")
def test_global_bad_numbers_and_what_is_out_of_reach(device: str) -> None:
    grid = make_grid("chunk", device)
    values = a_mass(grid, 2.0, device).masked_fill(~grid.visible, 7.0)
    values[:, 0], values[:, 1, 0], values[:, 1, 1, 0] = 0.0, float("nan"), -1.0
    values[:, 2, :, 0] = float("inf")
    assert_global_top_cdf(values, None, shares([0.6, 0.9, 1.0], device), grid)


@pytest.mark.usefixtures("several_tiles")
def test_heads_that_nobody_asks_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads below the bound have the mask that they have in any case; the others, and those of NaN, are not written."""
    grid = make_grid("chunk", device)
    values = a_mass(grid, 3.0, device)
    B, H = values.shape[:2]
    number = torch.linspace(0.0, 1.0, B * H, device=device).view(B, H)
    number[0, 0] = float("nan")
    asked = number < 0.5
    assert bool(asked.any())
    assert not bool(asked.all())
    given = values, None, shares(0.6, device), grid
    want = global_top_cdf.reference(*given, crossing=True)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    heads = HeadMask(number, shares(0.5, device))
    got = global_top_cdf_triton.global_top_cdf_triton(*given, crossing=True, heads=heads)
    assert torch.equal(got[asked], want[asked])
    assert not bool(got[~asked].any())


# A share of the row's best block or of its mass


@pytest.mark.parametrize("of", ["peak", "row"])
@pytest.mark.parametrize("kind", ["chunk", *(pytest.param(x, marks=slow) for x in OTHERS)])
def test_row_share(kind: str, of: Of, device: str) -> None:
    grid = make_grid(kind, device)
    values = a_mass(grid, 3.0, device).masked_fill(~grid.visible, 7.0)
    values[:, 0, 0], values[:, 0, 1, 0] = 0.0, float("nan")
    for alpha in (shares([0.3, 0.1, 1.0], device), 0.05):
        for also in (None, some_forced(grid, device)):
            for always in (NO_BLOCKS, AlwaysKept(near=3, last=2)):
                assert_same(row_share, values, also, alpha, grid, of=of, always=always)


def test_share_of_a_row_is_that_of_the_definition(device: str) -> None:
    """With numbers whose sums are exact in fp64, and whatever a row is padded to."""
    values = (torch.rand(1, 1, 1, 300, generator=draws()) ** 8 * 2**20).round().to(device)
    share = values.double() / values.double().sum()
    padded = torch.cat([values, torch.zeros_like(values)], -1)
    for alpha in (0.05, 0.2, 0.4):
        for row, n in ((values, 300), (padded, 600)):
            kept = row_share(row, None, alpha, one_row(n, device), of="row")[..., :299]  # before the diagonal
            want = share[..., :299] * n**0.5 >= torch.tensor(alpha).double()
            assert torch.equal(kept, want)
            assert 0 < kept.sum() < 299


def test_rows_too_long_for_a_program(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def no_launch(*_: object, **__: object) -> None:
        raise NotImplementedError

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(row_share, "kernel", lambda: no_launch)
    values = torch.rand(1, 1, 1, MAX_COLS + 1, generator=draws()).to(device)
    with pytest.raises(NotImplementedError):
        row_share(values[..., :MAX_COLS], None, 0.5, one_row(MAX_COLS, device), of="peak")
    given = values, None, 0.5, one_row(MAX_COLS + 1, device)
    assert torch.equal(row_share(*given, of="peak"), row_share.reference(*given, of="peak"))


def test_either(device: str) -> None:
    one, other = (chosen(2, 3, 61, 67, share=share, device=device, seed=7) for share in (0.2, 0.4))
    assert torch.equal(either_triton(one, ~other), one | ~other)


# The best blocks of a row

RULES: list[tuple[int | None, list[float] | None, dict[str, bool]]] = [
    (1, None, {"forced_first": True, "of_all_keys": False}),
    (3, None, {"forced_first": False, "of_all_keys": False}),
    (1000, None, {"forced_first": True, "of_all_keys": False}),
    (None, [0.4], {"forced_first": True, "of_all_keys": False}),
    (None, [0.1, 0.5, 1.0], {"forced_first": False, "of_all_keys": False}),
    (None, [0.07], {"forced_first": False, "of_all_keys": True}),
]


def assert_top_k(values: Tensor, forced: Tensor | None, grid: bs.Grid, rules: list[Any] = RULES) -> None:
    for k, share, how in rules:
        assert_same(top_k, values, forced, k, None if share is None else shares(share, values.device), grid, **how)


def random_values(grid: bs.Grid, device: str) -> tuple[Tensor, Tensor]:
    return randn(*heads_of(grid), device=device), randn(*heads_of(grid), device=device, seed=1) > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_top_k(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    # How a grid was cut decides what is visible, and a rule what is taken of that: each rule meets one grid.
    assert_top_k(*random_values(grid, device), grid, RULES if kind == "chunk" else RULES[3:5])


@slow
def test_top_k_of_ties_and_bad_numbers(device: str) -> None:
    """Ties by column, both zeros alike, and NaN below every number."""
    grid = make_grid("in order", device)
    values, forced = random_values(grid, device)
    values = (values * 2).round()  # with -0.0
    values[:, 1, :, ::2], values[1, 1] = float("nan"), float("nan")
    values[0, 2, :, 1::3], values[1, 2, :, ::3] = float("inf"), -float("inf")
    assert_top_k(values, None, grid, RULES[:4])
    assert_top_k(values, forced[:, :, :1], grid, RULES[4:])


def test_a_window_beside_bad_numbers(device: str) -> None:
    """What lies before the window is never taken in place of what lies in it and is NaN."""
    grid = make_grid("window", device)
    values, forced = random_values(grid, device)
    values[:, ::2] = float("nan")
    whole = [(None, [1.0], RULES[3][2])]
    assert_top_k(values, forced, grid, whole)
    kept = top_k(values, None, None, shares(1.0, device), grid, **RULES[3][2])
    assert torch.equal(kept, grid.visible.expand_as(values))


@slow
def test_strides_of_scores(device: str) -> None:
    grid = make_grid("sorted", device)
    values, forced = random_values(grid, device)
    assert_top_k(transposed(values, 2, 3), forced[:1, :1], grid, RULES[3:])
    assert_top_k(values[..., :1].expand(values.shape), None, grid, RULES[1:2])


# Ranks as lists


@pytest.mark.parametrize("cols", [1, 15, 16, 33, 130])
def test_visiting_order(cols: int, device: str) -> None:
    generator, shape = draws(cols), (2, 2, 3, cols)
    keep = (torch.rand(shape, generator=generator) < 0.6).to(device)
    keep[:, :, 1] = False  # a row with nothing kept
    distinct = torch.rand(shape, generator=generator).argsort(-1).int() - cols // 2
    few = torch.randint(-2, 3, shape, generator=generator, dtype=torch.int32)
    extreme = torch.where(few > 0, torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min)
    for rank in (distinct, few, extreme.int()):
        assert_same(visiting_order, keep, rank.to(device), torch.tensor([0.0, 0.5], device=device))


def test_visiting_order_of_layouts(device: str) -> None:
    """Heads that share one choice, and ranks whose rows are not consecutive in memory."""
    keep = chosen(1, 1, 4, 20, share=0.5, device=device).expand(2, 3, -1, -1)
    rank = torch.randint(-9, 9, (2, 3, 20, 4), dtype=torch.int32, device=device).mT
    assert_same(visiting_order, keep, rank, torch.zeros(6, device=device)[::2])


# Lines: verticals and slashes

SIZES = (1, 64, 300)  # one line, a power of two, and what fills no block of the search
lines_of_each_kind = pytest.mark.parametrize(
    "kind", ["plain", "bad", *(pytest.param(x, marks=slow) for x in ("ties", "steep", "none"))]
)


def lines_of(n: int, kind: str, device: str) -> Tensor:
    x = torch.rand(2, 3, n, generator=draws(n))
    if kind == "ties":
        x = (4 * x).round()
    elif kind == "steep":
        x = torch.exp(-60 * x)
    elif kind == "none":
        x = torch.zeros_like(x)
    elif kind == "bad":
        x[:, 1, ::3], x[:, 2, :2] = float("nan"), float("inf")
    return x.to(device)


def numbers(*of_heads: float, device: str) -> Tensor:
    return torch.tensor(of_heads, dtype=torch.float64, device=device).view(1, -1, 1)


@lines_of_each_kind
def test_fewest(kind: str, device: str) -> None:
    for n in SIZES:
        both = lines_of(n, kind, device), lines_of(n // 2 + 3, kind, device)
        for mass, least, most in (
            ([0.0], 3, None), ([0.9], 0, None), ([0.0, 0.5, 1.0], 0, 7), ([0.95, 0.1, 0.5], 6, 9), ([0.5], 2**40, None),
        ):  # fmt: skip
            assert_same(fewest, *both, numbers(*mass, device=device), least, most)


@lines_of_each_kind
def test_heaviest(kind: str, device: str) -> None:
    for n in SIZES:
        weight = lines_of(n, kind, device) - (0.5 if kind == "plain" else 0.0)
        others = lines_of(n // 2 + 3, kind, device)
        for counts, first in (([1.0], 0), ([n // 2, 0, 2 * n], 3), ([40.0], 2**29), ([7.0, 9.0, 1e9], 0)):
            count, spared = numbers(*counts, device=device), (numbers(5.0, device=device), n // 3)
            assert_same(heaviest, weight, count, first)
            want = assert_same(heaviest, weight, count, first, spared)
            assert not want[..., max(first, n - min(5, n // 3)) :].any()
            assert_same(heaviest_of_both, weight, others, (count, numbers(4.0, device=device)), (first, 2), spared)


def by_ranges(keys: Tensor, distances: Tensor, run: int, grid: bs.Grid) -> Tensor:
    """The blocks of chosen columns, and from one range of distances after the other."""
    near, far = grid.q_first - grid.k_last, grid.q_last - grid.k_first
    if not grid.causal:
        near, far = torch.maximum(near, -far), torch.maximum(far, -near)
    out = keys.unsqueeze(2).expand(heads_of(grid)).clone()
    for d in distances.any(1).any(0).nonzero()[:, 0].tolist():
        has = (near // run <= d) & (d <= far // run)
        out |= has & distances[:, :, d, None, None]
    return (out | grid.diagonal) & grid.visible


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_lines_cross(kind: str, device: str) -> None:
    """Also against the distances of every pair."""
    grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    longest = max(grid.q_len, grid.k_len)
    also = chosen(B, Hq, rows, cols, share=0.1, device=device, seed=4) & grid.visible
    whole = numbers(0.5, 1.0, 0.0, device=device)
    for key_run, run in ((1, 1), (1, grid.k_block), (grid.k_block, 1)):
        # By blocks one entry stands for a column; by keys, in original order, as many as a block has.
        keys = chosen(B, Hq, cols if key_run == 1 else grid.k_len, share=0.05, device=device, seed=3)
        distances = chosen(B, Hq, -(-longest // run), share=0.1, device=device, seed=3)
        lines = ChosenRuns(running_count(keys), key_run), ChosenRuns(running_count(distances), run)
        reference = assert_same(vertical_slash_blocks, *lines, grid)
        if key_run == 1:
            assert torch.equal(reference, by_ranges(keys, distances, run, grid))
        for more in (
            {"also": also},
            {"whole": whole},
            {"first": 9},
            {"also": also[:, :1], "whole": whole[:, :1], "first": 1},
        ):
            assert_same(vertical_slash_blocks, *lines, grid, **more)

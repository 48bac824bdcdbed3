"""The best blocks of a row: the search against the sort, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.select.top_k import top_k
from tests.kernels.block_grids import KINDS, heads_of, make_grid

pytest.importorskip("triton")
from blocksparse.kernels.select.top_k_triton import top_k_triton

RULES: list[dict[str, Any]] = [
    {"k": 1, "share": None, "forced_first": True, "of_all_keys": False},
    {"k": 3, "share": None, "forced_first": False, "of_all_keys": False},
    {"k": 1000, "share": None, "forced_first": True, "of_all_keys": False},
    {"k": None, "share": [0.4], "forced_first": True, "of_all_keys": False},
    {"k": None, "share": [0.1, 0.5, 1.0], "forced_first": False, "of_all_keys": False},
    {"k": None, "share": [0.07], "forced_first": False, "of_all_keys": True},
]


def assert_same(values: Tensor, forced: Tensor | None, grid: bs.Grid, rules: list[dict[str, Any]] = RULES) -> None:
    for rule in rules:
        call = dict(rule)
        if call["share"] is not None:
            call["share"] = torch.tensor(call["share"], dtype=torch.float64, device=values.device).reshape(
                1, -1, 1, 1
            )
        k, share = call.pop("k"), call.pop("share")
        want = top_k.reference(values, forced, k, share, grid, **call)
        for compute in (top_k_triton, top_k):
            assert torch.equal(compute(values, forced, k, share, grid, **call), want), rule


def random_values(grid: bs.Grid, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values, chances = (torch.randn(heads_of(grid), generator=generator).to(device) for _ in range(2))
    return values, chances > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_reference(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    values, forced = random_values(grid, device)
    # How a grid was cut decides what is visible, and a rule what is taken of that: each rule meets one grid.
    assert_same(values, forced, grid, RULES if kind == "chunk" else RULES[3:5])


@pytest.mark.slow
def test_ties_and_bad_numbers(device: str) -> None:
    """Ties by column, both zeros alike, and NaN below every number."""
    grid = make_grid("in order", device)
    values, forced = random_values(grid, device)
    values = (values * 2).round()  # with -0.0
    values[:, 1, :, ::2] = float("nan")
    values[1, 1] = float("nan")
    values[0, 2, :, 1::3] = float("inf")
    values[1, 2, :, ::3] = -float("inf")
    assert_same(values, None, grid, RULES[:4])
    assert_same(values, forced[:, :, :1], grid, RULES[4:])


def test_a_window_beside_bad_numbers(device: str) -> None:
    """What lies before the window is never taken in place of what lies in it and is NaN."""
    grid = make_grid("window", device)
    values, forced = random_values(grid, device)
    values[:, ::2] = float("nan")
    assert_same(values, forced, grid, [{**RULES[3], "share": [1.0]}])
    visible = grid.visible.expand_as(values)
    share = torch.ones(1, 1, 1, 1, dtype=torch.float64, device=device)
    call = {"forced_first": True, "of_all_keys": False}
    assert torch.equal(top_k(values, None, None, share, grid, **call), visible)


@pytest.mark.slow
def test_strides_of_scores(device: str) -> None:
    grid = make_grid("sorted", device)
    values, forced = random_values(grid, device)
    assert_same(values.mT.contiguous().mT, forced[:1, :1], grid, RULES[3:])
    assert_same(values[..., :1].expand(values.shape), None, grid, RULES[1:2])

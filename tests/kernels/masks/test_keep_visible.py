"""A choice spread over finer blocks that are visible: the Triton kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.kernels.masks.visibility import keep_visible
from blocksparse.kernels.masks.visibility_triton import keep_visible_triton
from tests.kernels.block_grids import KINDS, heads_of, make_grid


def random_choice(*shape: int, device: str) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.4).to(device)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_of_position(kind: str, diagonal: bool, device: str) -> None:
    """A choice may differ by any of the axes and no other."""
    grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    for shape in (
        (1, 1, rows, cols),
        (B, Hq, rows, cols),
        (1, 1, 1, cols),
        (1, 1, rows, 1),
        (1, Hq, rows, cols),
        (cols,),
        (rows, 1),
    ):
        keep = random_choice(*shape, device=device)
        want = keep_visible.reference(keep, grid, diagonal=diagonal)
        assert torch.equal(keep_visible_triton(keep, grid, diagonal=diagonal), want)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_finer_blocks(kind: str, n: int, device: str) -> None:
    grid = make_grid(kind, device)
    fine = grid.refined(n)
    B, Hq, rows, cols = heads_of(grid)
    skipped = grid.q_lead // fine.q_block
    for heads in (1, Hq):
        keep = random_choice(B, heads, rows, cols, device=device)
        for given in (keep, keep[:, :1].expand(-1, heads, -1, -1)):
            got = keep_visible_triton(given, fine, n, skipped)
            want = keep_visible.reference(given, fine, n, skipped)
            assert torch.equal(got.expand_as(want), want)


ALWAYS = [
    AlwaysKept(near=0), AlwaysKept(near=21), AlwaysKept(first=1), AlwaysKept(first=40), AlwaysKept(stride=(1, 0)), AlwaysKept(stride=(5, 2**32 - 1)),
    AlwaysKept(near=9, first=3, stride=(7, 3)), AlwaysKept(last=1), AlwaysKept(first=3, last=30),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_places(kind: str, device: str) -> None:
    """By themselves, and on top of a choice on the same blocks or on coarser ones."""
    grid = make_grid(kind, device)
    fine = grid.refined(2)
    B, Hq, rows, cols = heads_of(grid)
    keep = random_choice(B, Hq, rows, cols, device=device)
    skipped = grid.q_lead // fine.q_block
    for i, always in enumerate(ALWAYS):
        diagonal = i % 2 == 0  # in turn, also in the loop below
        for args in ((None, grid), (keep, grid), (keep, fine, 2, skipped)):
            diagonal = not diagonal
            want = keep_visible.reference(*args, always=always, diagonal=diagonal)
            for compute in (keep_visible_triton, keep_visible):
                assert torch.equal(compute(*args, always=always, diagonal=diagonal).expand_as(want), want)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_size(kind: str, device: str) -> None:
    """All blocks are near, and first, whatever number beyond the prompt says so."""
    grid = make_grid(kind, device)
    for n in (2**20, 2**31 - 1, 2**32, 2**70):
        for always in (AlwaysKept(near=n), AlwaysKept(first=n)):
            for compute in (keep_visible_triton, keep_visible.reference):
                assert torch.equal(compute(None, grid, always=always), grid.visible)
        rare = AlwaysKept(stride=(n, 1))
        want = keep_visible.reference(None, grid, always=rare)
        assert torch.equal(keep_visible_triton(None, grid, always=rare).expand_as(want), want)


def test_two_of_a_kind_are_not_one() -> None:
    assert AlwaysKept(near=3).joined(AlwaysKept(first=2)) == AlwaysKept(near=3, first=2)
    assert AlwaysKept(near=3).joined(AlwaysKept(near=3)) is None
    assert AlwaysKept(near=0).joined(AlwaysKept(near=1, first=2)) is None

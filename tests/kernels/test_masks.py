"""Masks: positions of blocks, hashes, what is visible and which blocks are listed. Kernels have the reference's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.launched import BlockPlan
from blocksparse.kernels.common.sizes import index_dtype
from blocksparse.kernels.masks.blocks import block_bounds, block_lists, block_places
from blocksparse.kernels.masks.grid import AlwaysKept
from blocksparse.kernels.masks.visibility import any_head, counter_hash, keep_visible, visited_columns
from blocksparse.testing import make_qkv
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.kernels.compare import assert_same, chosen, draws, order
from tests.specs import grid_of

pytest.importorskip("triton")
from blocksparse.kernels.masks import blocks_triton
from blocksparse.kernels.masks.visibility_triton import counter_hash_triton


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize(("heads", "rows", "cols"), [(1, 1, 1), (3, 70, 33), (2, 5, 1500)])
def test_hashes_of_counters(seed: int, heads: int, rows: int, cols: int, device: str) -> None:
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    row = torch.arange(2**32 - rows, 2**32, device=device).unsqueeze(1)
    col = torch.arange(7, 7 + cols, device=device)
    for counters in ((head, row, col), (row, col), (row,), (col,)):
        assert torch.equal(counter_hash_triton(seed, *counters), counter_hash.reference(seed, *counters))


# What any of several heads keeps


def test_visited_columns_are_those_of_all_rows_and_the_first() -> None:
    keep = torch.zeros(2, 4, 3, 5, dtype=torch.bool)
    keep[0, 0, 1, 2] = keep[0, 1, 2, 4] = keep[1, 3, 0, 3] = True
    assert visited_columns(keep, 2).int().tolist() == [
        [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [1, 0, 0, 1, 0]],
    ]
    assert visited_columns(keep, 4).sum().item() == 8 + 3
    assert visited_columns(keep[:, :1].expand(-1, 4, -1, -1), 2)[0, 1].int().tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (3, 1), (3, 200), (40, 7)])
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_any_head(heads: int, rows: int, cols: int, device: str) -> None:
    whole = chosen(2, 6, rows, cols + 1, share=0.1, device=device)
    for keep in (whole[..., 1:], whole[..., 1:].contiguous(), whole[:, :1, :, 1:].expand(-1, 6, -1, -1)):
        assert_same(any_head, keep, heads)
        assert_same(visited_columns, keep, heads)


# Positions of blocks


def positions(*shape: int, device: str, empty: float = 0.3) -> Tensor:
    generator = draws()
    position = torch.randint(0, 10**6, shape, generator=generator, dtype=torch.int32)
    return position.masked_fill(torch.rand(shape, generator=generator) < empty, -1).to(device)


@pytest.mark.parametrize("block", [1, 3, 16, 128])
@pytest.mark.parametrize("blocks", [1, 7, 65])
def test_bounds(block: int, blocks: int, device: str) -> None:
    for empty in (0.0, 0.5, 1.0):
        k = positions(1, 1, 1, block * blocks, device=device, empty=empty)
        assert_same(block_bounds, k[:, :, 0], positions(1, 1, 1, 48, device=device), block, 16, 4)
        assert_same(block_bounds, positions(1, 1, 48, device=device), k, 16, block, 4)


@pytest.mark.parametrize(("H", "heads"), [(1, 6), (2, 6), (6, 6)])
def test_bounds_of_heads_and_groups(H: int, heads: int, device: str) -> None:
    q, k = positions(2, heads, 96, device=device), positions(2, H, 3, 64, device=device)
    assert_same(block_bounds, q, k, 32, 16, heads)
    assert_same(block_bounds, q[:1, :1].expand(q.shape), k[:1, :, :1].expand(k.shape), 32, 16, heads)


def test_bounds_of_a_block_longer_than_a_tile(device: str) -> None:
    k = positions(1, 2, 1, 3 * 3000, device=device, empty=1e-4)
    assert_same(block_bounds, k[:, :, 0], k, 3000, 3000, 2)


@pytest.mark.parametrize(
    ("M", "N", "offset"), [(64, 64, 0), (50, 50, 0), (50, 83, 33), (5, 83, 78), (16, 64, 48), (70, 40, 0)]
)
@pytest.mark.parametrize("ordered", ["neither", "queries", "keys", "groups"])
def test_positions_of_whole_blocks(M: int, N: int, offset: int, ordered: str, device: str) -> None:
    """In order or by maps, of prompts and chunks of any length; a map that says it all is not copied."""
    q, k = torch.zeros(2, 4, M, 8, device=device), torch.zeros(2, 2, N, 8, device=device)
    q_index = {"queries": order(2, 4, M, device=device), "groups": order(1, 4, M, device=device).expand(2, 4, M)}
    k_index = {"keys": order(2, 2, 1, N, device=device), "groups": positions(2, 4, 3, 41, device=device)}
    maps = q_index.get(ordered), k_index.get(ordered)
    for q_block, k_block in ((16, 16), (16, 5), (48, 32)):
        made = [
            compute(q, k, *maps, q_block, k_block, offset)
            for compute in (block_places.reference, block_places, block_places.kernel())
        ]
        for got in made[1:]:
            for mine, its in zip((*got[:2], *got[2]), (*made[0][:2], *made[0][2]), strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=0)
            assert [mine is its for mine, its in zip(got, maps, strict=False)] == [
                mine is its for mine, its in zip(made[0], maps, strict=False)
            ]


# Visible blocks


def assert_visible(*given: object, **named: object) -> None:
    """Where neither the choice nor positions differ, the kernel may have one entry."""
    want = keep_visible.reference(*given, **named)  # type: ignore[arg-type]
    for compute in (keep_visible.kernel(), keep_visible):
        assert torch.equal(compute(*given, **named).expand_as(want), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_of_position(kind: str, diagonal: bool, device: str) -> None:
    """A choice may differ by any of the axes and no other."""
    grid = make_grid(kind, device)
    B, Hq, rows, cols = heads_of(grid)
    whole, by_column = (B, Hq, rows, cols), (1, 1, 1, cols)
    axes: tuple[int, ...]
    for axes in ((1, 1, rows, cols), whole, by_column, (1, 1, rows, 1), (1, Hq, rows, cols), (cols,), (rows, 1)):
        assert_same(keep_visible, chosen(*axes, share=0.4, device=device), grid, diagonal=diagonal)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_finer_blocks(kind: str, n: int, device: str) -> None:
    grid = make_grid(kind, device)
    fine = grid.refined(n)
    B, Hq, rows, cols = heads_of(grid)
    for heads in (1, Hq):
        keep = chosen(B, heads, rows, cols, share=0.4, device=device)
        for given in (keep, keep[:, :1].expand(-1, heads, -1, -1)):
            assert_visible(given, fine, n, grid.q_lead // fine.q_block)


ALWAYS = [
    AlwaysKept(near=0), AlwaysKept(near=21), AlwaysKept(first=1), AlwaysKept(first=40), AlwaysKept(stride=(1, 0)), AlwaysKept(stride=(5, 2**32 - 1)),
    AlwaysKept(near=9, first=3, stride=(7, 3)), AlwaysKept(last=1), AlwaysKept(first=3, last=30),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_places(kind: str, device: str) -> None:
    """By themselves, and on top of a choice on the same blocks or on coarser ones."""
    grid = make_grid(kind, device)
    fine = grid.refined(2)
    keep = chosen(*heads_of(grid), share=0.4, device=device)
    for i, always in enumerate(ALWAYS):
        diagonal = i % 2 == 0  # in turn, also in the loop below
        for args in ((None, grid), (keep, grid), (keep, fine, 2, grid.q_lead // fine.q_block)):
            diagonal = not diagonal
            assert_visible(*args, always=always, diagonal=diagonal)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_size(kind: str, device: str) -> None:
    """All blocks are near, and first, whatever number beyond the prompt says so."""
    grid = make_grid(kind, device)
    for n in (2**20, 2**31 - 1, 2**32, 2**70):
        for always in (AlwaysKept(near=n), AlwaysKept(first=n)):
            assert torch.equal(assert_same(keep_visible, None, grid, always=always), grid.visible)
        assert_visible(None, grid, always=AlwaysKept(stride=(n, 1)))


def test_two_of_a_kind_are_not_one() -> None:
    assert AlwaysKept(near=3).joined(AlwaysKept(first=2)) == AlwaysKept(near=3, first=2)
    assert AlwaysKept(near=3).joined(AlwaysKept(near=3)) is None
    assert AlwaysKept(near=0).joined(AlwaysKept(near=1, first=2)) is None


# Lists


def random_keep(grid: bs.Grid, share: float, device: str) -> Tensor:
    return chosen(*heads_of(grid), share=share, device=device) & grid.visible


def assert_same_lists(keep: Tensor, grid: bs.Grid) -> None:
    want = assert_same(block_lists, keep, grid)
    assert [x.dtype for x in want] == [torch.int32, torch.int32, index_dtype(keep.shape[-1])]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_lists(kind: str, share: float, device: str) -> None:
    grid = make_grid(kind, device)
    assert_same_lists(random_keep(grid, share, device), grid)


def test_lists_of_a_row_in_several_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(blocks_triton, "_NARROWEST", 16)
    monkeypatch.setattr(blocks_triton, "_WIDEST", 32)
    grid = make_grid("wide", device)
    assert_same_lists(random_keep(grid, 0.5, device), grid)


def test_lists_of_shared_and_strided_masks(device: str) -> None:
    grid, plain = make_grid("per query head", device), make_grid("in order", device)
    shared = bs.BlockMask(random_keep(grid, 0.3, device), grid).share_heads()
    assert_same_lists(shared.keep, shared.grid)
    keep = random_keep(plain, 0.5, device)
    assert_same_lists(keep.transpose(2, 3).contiguous().transpose(2, 3), plain)
    assert_same_lists(keep[:, :1].expand(keep.shape), plain)


@pytest.mark.parametrize(("cols", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_lists_are_int16_while_it_holds_every_block(cols: int, dtype: torch.dtype, device: str) -> None:
    """One row over blocks of one key; what other kernels take is int32 either way."""
    q, k, _ = make_qkv(N=cols, M=1, Hq=1, Hkv=1, D=4, device=device)
    grid = grid_of(q, k, 1)
    keep = random_keep(grid, 0.5, device) | grid.diagonal
    assert_same_lists(keep, grid)
    plan = BlockPlan.of(bs.BlockMask(keep, grid))
    assert plan.index.dtype == dtype == index_dtype(cols)
    assert plan.index.max() == cols - 1
    assert plan.full_index.dtype == plan.partial_index.dtype == torch.int32
    assert torch.equal(plan.to_dense(), keep)


def test_plan_by_hand(device: str) -> None:
    """Full blocks first, partial ones behind them, and each part as a list of its own."""
    q, k, _ = make_qkv(N=64, Hq=1, Hkv=1, D=4, device=device)
    grid = grid_of(q, k, 16)
    keep = grid.visible.clone()
    keep[..., 3, 1] = False
    plan = BlockPlan.of(bs.BlockMask(keep, grid))
    assert plan.full_count.tolist() == [[[0, 1, 2, 2]]]
    assert plan.partial_count.tolist() == [[[1, 1, 1, 1]]]
    assert plan.index.tolist() == [[[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 2, 3, 0]]]]
    assert plan.full_index[0, 0, 3, :2].tolist() == [0, 2]
    assert plan.partial_index[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(plan.to_dense(), keep)

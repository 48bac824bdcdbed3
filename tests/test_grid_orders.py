"""Orders of image and video tokens: known answers, and what every one of them must keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from blocksparse.order.grid_orders import (
    ColumnOrder,
    GivenOrder,
    GridOrder,
    HilbertOrder,
    RasterOrder,
    TileOrder,
    TimeOrder,
)
from blocksparse.testing import make_qkv
from tests.specs import not_none

Sizes = tuple[int, int, int]
MOVING: tuple[type[GridOrder], ...] = (HilbertOrder, ColumnOrder, TimeOrder, TileOrder)
GRIDS = [(1, 1, 1), (1, 7, 5), (3, 4, 5), (13, 30, 45)]

each_moving = pytest.mark.parametrize("order", MOVING, ids=lambda order: order.__name__)
each_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def coordinates(cells: Tensor, grid: Sizes) -> Tensor:
    """`[n, 3]`, frame, row and column of each cell."""
    _, H, W = grid
    return torch.stack((cells // (H * W), cells // W % H, cells % W), dim=-1)


def cells_of(order: GridOrder) -> Tensor:
    """With places that stay written out."""
    cells = order.cells("cpu")
    return torch.arange(math.prod(order.sizes)) if cells is None else cells


@each_grid
@each_moving
def test_every_cell_has_one_place(order: type[GridOrder], grid: Sizes) -> None:
    cells = cells_of(order(grid))
    assert cells.dtype == torch.int64
    assert torch.equal(cells.sort().values, torch.arange(math.prod(grid)))


@pytest.mark.parametrize(
    "grid", [(2, 2, 2), (8, 8, 8), (16, 16, 16), (1, 2, 2), (1, 32, 32), (8, 1, 8), (8, 8, 1), (1, 1, 8)], ids=str
)
def test_hilbert_steps_to_a_neighbour(grid: Sizes) -> None:
    place = coordinates(cells_of(HilbertOrder(grid)), grid)
    assert bool((place.diff(dim=0).abs().sum(-1) == 1).all())


@pytest.mark.parametrize("grid", [(3, 4, 5), (1, 7, 5), (5, 1, 8), (8, 7, 2)], ids=str)
def test_hilbert_leaves_out_what_lies_outside(grid: Sizes) -> None:
    """A grid is walked as the cube around it is; axes of size 1 are none."""
    cube: Sizes = tuple(8 if size > 1 else 1 for size in grid)  # type: ignore[assignment]
    around = coordinates(cells_of(HilbertOrder(cube)), cube)
    inside = around[(around < torch.tensor(grid)).all(-1)]
    assert torch.equal(coordinates(cells_of(HilbertOrder(grid)), grid), inside)


def test_hilbert_of_small_squares() -> None:
    """Drawn by hand: the quarters are walked as the square of 2 is, the first and the last one turned."""
    assert cells_of(HilbertOrder((1, 2, 2))).tolist() == [0, 1, 3, 2]
    assert cells_of(HilbertOrder((1, 4, 4))).tolist() == [0, 4, 5, 1, 2, 3, 7, 6, 10, 11, 15, 14, 13, 9, 8, 12]
    assert cells_of(HilbertOrder((2, 2, 2))).tolist() == [0, 1, 3, 2, 6, 7, 5, 4]


def test_simple_orders() -> None:
    """Cells of two frames: 0 1 2 over 3 4 5, then 6 7 8 over 9 10 11."""
    grid = (2, 2, 3)
    raster: GridOrder = RasterOrder(grid, prefix=2, suffix=5)
    assert raster.cells("cpu") is None
    x = torch.zeros(1, 1, 12 + 7, 1)
    in_place = raster(x, x, bs.AttentionSpec(scale=1.0, causal=False))
    assert in_place.k_index is in_place.q_index is None
    assert cells_of(ColumnOrder(grid)).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert cells_of(TimeOrder(grid)).tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert cells_of(TileOrder(grid, (1, 2, 2))).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 9, 10, 8, 11]
    assert cells_of(TileOrder(grid, (2, 1, 2))).tolist() == [0, 1, 6, 7, 2, 8, 3, 4, 9, 10, 5, 11]
    assert cells_of(TileOrder(grid, (9, 9, 9))).tolist() == list(range(12))


@each_grid
@each_moving
def test_text_stays_and_queries_stand_as_keys_do(order: type[GridOrder], grid: Sizes) -> None:
    n, prefix, suffix = math.prod(grid), 3, 4
    N = prefix + n + suffix
    q, k = torch.zeros(2, 6, N, 1), torch.zeros(2, 2, N, 1)
    permutation = order(grid, prefix=prefix, suffix=suffix)(q, k, bs.AttentionSpec(scale=1.0, causal=False))
    open_end = order(grid, prefix=prefix, suffix=None)(q, k, bs.AttentionSpec(scale=1.0, causal=False))
    assert permutation.k_index is not None
    assert permutation.q_index is not None
    assert permutation.k_index.dtype == permutation.q_index.dtype == torch.int32
    assert (permutation.k_index.shape, permutation.q_index.shape) == ((2, 2, 1, N), (2, 6, N))
    line = permutation.k_index[0, 0, 0]
    assert line[:prefix].tolist() == [0, 1, 2]
    assert line[-suffix:].tolist() == list(range(N - suffix, N))
    assert torch.equal(line[prefix:-suffix].long() - prefix, cells_of(order(grid)))
    assert bool((permutation.k_index == line).all() & (permutation.q_index == line).all())
    assert torch.equal(not_none(open_end.k_index), permutation.k_index)


@pytest.mark.parametrize("start", [1, 5, 16, 40, 62, 82])
@each_moving
def test_a_chunk_keeps_the_order_of_its_queries(order: type[GridOrder], start: int) -> None:
    q, k, v = make_qkv(B=2, N=83, D=16, dtype=torch.float64)
    pipeline = bs.Pipeline(
        order((3, 4, 5), prefix=7, suffix=None), bs.MeanPoolScorer(16), bs.Everything(), bs.ReferenceExecutor()
    )
    whole, chunk = pipeline.trace(q, k, v), pipeline.trace(q[:, :, start:], k, v)
    line = not_none(whole.permutation.q_index)[0, 0]
    assert torch.equal(not_none(chunk.permutation.q_index), (line[line >= start] - start).expand(2, 4, -1))
    torch.testing.assert_close(chunk.output.out, whole.output.out[:, :, start:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("M", [5, 100])
def test_other_queries_stay_in_place(M: int) -> None:
    """Cross attention: the keys are the video, the queries are something else."""
    _, k, v = make_qkv(N=60, D=16, dtype=torch.float64)
    q, _, _ = make_qkv(N=M, D=16, seed=1, dtype=torch.float64)
    pipeline = bs.Pipeline(
        HilbertOrder((3, 4, 5), suffix=None), bs.MeanPoolScorer(16), bs.Everything(), bs.ReferenceExecutor()
    )
    trace = pipeline.trace(q, k, v, causal=False)
    assert trace.permutation.q_index is None
    assert trace.permutation.k_index is not None
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(trace.output.out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_given_order_is_taken(dtype: torch.dtype) -> None:
    q, k, _ = make_qkv(N=64, D=3)
    computed = HilbertOrder((3, 4, 5), prefix=2, suffix=None)
    given = GivenOrder((3, 4, 5), cells_of(computed).to(dtype), prefix=2, suffix=None)
    mine, its = (order(q, k, bs.AttentionSpec(scale=1.0, causal=False)).k_index for order in (given, computed))
    assert mine is not None
    assert its is not None
    assert torch.equal(mine, its)


LENGTHS = [
    ({}, 59, r"HilbertOrder needs 60 keys \(prefix 0 \+ grid 3 x 4 x 5 = 60 \+ suffix 0\): Nk=59. Give"),
    (
        {"prefix": 7, "suffix": None},
        66,
        r"at least 67 keys \(prefix 7 \+ grid 3 x 4 x 5 = 60 \+ any suffix\): Nk=66",
    ),
    ({"prefix": 7}, 68, r"needs 67 keys \(prefix 7 \+ grid 3 x 4 x 5 = 60 \+ suffix 0\): Nk=68"),
    (
        {"suffix": 9},
        60,
        r"needs 69 keys \(prefix 0 \+ grid 3 x 4 x 5 = 60 \+ suffix 9\): Nk=60\. .*prefix= and suffix=",
    ),
]


@pytest.mark.parametrize(("text", "N", "message"), LENGTHS)
def test_the_number_of_tokens_must_fit(text: dict[str, int], N: int, message: str) -> None:
    x = torch.zeros(1, 1, N, 1)
    with pytest.raises(ValueError, match=message):
        HilbertOrder((3, 4, 5), **text)(x, x, bs.AttentionSpec(scale=1.0, causal=False))
    with pytest.raises(ValueError, match="RasterOrder needs"):
        RasterOrder((3, 4, 5), **text)(x, x, bs.AttentionSpec(scale=1.0, causal=False))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("M", [83, 40])
@each_moving
def test_nothing_waits_for_the_device(order: type[GridOrder], M: int, device: str) -> None:
    """Tensors without data suffice, so nothing reads one; where a GPU is, it says so itself."""
    q, k = torch.zeros(1, 2, M, 1, device="meta"), torch.zeros(1, 1, 83, 1, device="meta")
    permutation = order((3, 4, 5), prefix=5, suffix=None)(q, k, bs.AttentionSpec(scale=1.0))
    assert permutation.q_index is not None
    assert (permutation.q_index.device.type, permutation.q_index.shape) == ("meta", (1, 2, M))
    if device == "cuda":
        q, k = torch.zeros(1, 2, M, 1, device=device), torch.zeros(1, 1, 83, 1, device=device)
        try:
            torch.cuda.set_sync_debug_mode("error")
            order((3, 4, 5), prefix=5, suffix=None)(q, k, bs.AttentionSpec(scale=1.0))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_orders_are_the_same_on_every_device(device: str) -> None:
    if device == "cpu":
        pytest.skip("no GPU here")
    for order in MOVING:
        there = not_none(order((13, 30, 45)).cells(device))
        assert torch.equal(there.cpu(), cells_of(order((13, 30, 45))))


@pytest.mark.parametrize(
    "order", [HilbertOrder(), TimeOrder(), ColumnOrder(), RasterOrder(), TileOrder(tile=(1, 2, 2))]
)
def test_an_order_without_a_grid_cannot_be_called(order: GridOrder) -> None:
    """A host may give it one."""
    q, k, _ = make_qkv(N=24, D=8)
    with pytest.raises(ValueError, match=r"Order has no grid. Give it as .*Order\(\(T, H, W\)\) in tokens"):
        order(q, k, bs.AttentionSpec(scale=1.0, causal=False))
    assert repr(order).startswith(f"{type(order).__name__}(grid=None, ")

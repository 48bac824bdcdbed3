"""MInference's vertical-slash heads against the authors' code; its stages, A-shape and tri-shape by hand."""

from __future__ import annotations

import pytest
import torch
from tests.papers.golden_cases import cases, differing, load
from tests.specs import grid_of, kept, kept_pairs
from torch import Tensor

import blocksparse as bs
from blocksparse.presets.text import a_shape, minference, tri_shape
from blocksparse.score.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.select.positions import LastQueries
from blocksparse.select.vertical_slash import VerticalSlashTopK, _tiles
from blocksparse.testing import make_qkv

MINF = cases("minf")
B16 = 16
reference = bs.ReferenceExecutor()


def minf(name: str, *, as_released: bool) -> bs.Trace[bs.GlobalPermutation, VerticalSlashScores, bs.BlockMask]:
    case = load(name)
    pipeline = minference(
        case.params["vertical_size"], case.params["slash_size"], as_released=as_released, executor=reference
    )
    return pipeline.trace(case.q, case.k, case.v)


def marked(like: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter_(-1, index.long(), True)


@pytest.mark.parametrize("name", MINF)
def test_minference_mask_and_lines(name: str) -> None:
    """The same keys and the same distances, from the same sums."""
    case, trace = load(name), minf(name, as_released=True)
    assert differing(trace.mask, case).tolist() == []
    scores = trace.scores
    selector = VerticalSlashTopK(case.params["vertical_size"], case.params["slash_size"], released=True)
    golden = {key: torch.from_numpy(x) for key, x in case.arrays.items()}
    assert torch.equal(selector.keys(scores), marked(scores.vertical, golden["vertical_idx"]))
    assert torch.equal(selector.distances(scores), marked(scores.slash, golden["slash_idx"]))
    vertical, slash = golden["scores_vertical"].flatten(2), golden["scores_slash"].flatten(2).flip(-1)
    for ours, theirs in ((scores.vertical, vertical), (scores.slash, slash)):
        plain = theirs.isfinite()  # the forced ones are infinite
        torch.testing.assert_close(64 * ours[plain], theirs[plain], rtol=1e-5, atol=1e-6)


def wanted_pairs(selector: VerticalSlashTopK, scores: VerticalSlashScores) -> Tensor:
    """Pairs whose key or whose distance is chosen, `[B, Hq, M, N]` bool."""
    grid = scores.grid
    query = torch.arange(grid.q_len)[:, None] + (grid.k_len - grid.q_len if grid.causal else 0)
    distance = query - torch.arange(grid.k_len)
    seen = distance >= 0 if grid.causal else torch.ones_like(distance, dtype=torch.bool)
    at_distance = selector.distances(scores)[..., distance.abs().clamp_max(scores.slash.shape[-1] - 1)]
    return (selector.keys(scores).unsqueeze(2) | at_distance) & seen


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("M", [83, 60, 5])
def test_wanted_pairs_are_kept_in_any_order(M: int, causal: bool, released: bool) -> None:
    q, k, v = make_qkv(B=2, M=M, N=83, D=16)
    selector = VerticalSlashTopK([3, 5, 8, 1], [4, 1, 9, 20], sink=2, recent=3, released=released)
    for permuter in (bs.Identity(), bs.SegmentKeySort(32, last_q=8)):
        trace = bs.Pipeline(permuter, VerticalSlashScorer(B16, last_q=10), selector, reference).trace(
            q, k, v, causal=causal
        )
        assert bool((wanted_pairs(selector, trace.scores) <= kept_pairs(trace.mask)).all())


def scores_of(
    N: int, *, vertical: list[int], slash: list[int], Hq: int = 1, M: int | None = None
) -> VerticalSlashScores:
    """Scores whose heaviest keys and distances are these, heaviest first."""
    q, k = torch.zeros(1, Hq, M or N, 8), torch.zeros(1, 1, N, 8)
    grid = grid_of(q, k, B16)
    columns, distances = torch.zeros(1, Hq, N), torch.zeros(1, Hq, N)
    for lines, chosen in ((columns, vertical), (distances, slash)):
        for place, line in enumerate(chosen):
            lines[..., line] = 0.5 ** (place + 1)
    values = torch.zeros(1, Hq, grid.rows, grid.cols)
    return VerticalSlashScores(values, grid, vertical=columns, slash=distances, divergence=torch.zeros(1, Hq))


def chosen(lines: Tensor, head: int = 0) -> list[int]:
    found: list[int] = lines[0, head].nonzero().flatten().tolist()
    return found


def test_forced_lines_use_up_the_budget() -> None:
    scores = scores_of(96, vertical=[40, 50, 60], slash=[30, 20, 25])
    selector = VerticalSlashTopK(4, 5, sink=2, recent=3)
    assert chosen(selector.keys(scores)) == [0, 1, 40, 50]
    assert chosen(selector.distances(scores)) == [0, 1, 2, 20, 30]


@pytest.mark.parametrize("released", [False, True])
def test_the_own_key_is_forced_first(released: bool) -> None:
    """Where the budget is short of the forced distances, the authors' ties may drop distance 0."""
    scores = scores_of(200, vertical=[40], slash=[150])
    selector = VerticalSlashTopK(1, 60, recent=100, released=released)
    assert chosen(selector.distances(scores)) == list(range(60))
    own = kept_pairs(selector(scores)).diagonal(dim1=-2, dim2=-1)
    assert bool(own.all())


def test_keys_that_the_nearest_distances_keep_take_no_budget() -> None:
    scores = scores_of(96, vertical=[95, 90, 40, 85, 50], slash=[30])
    selector = VerticalSlashTopK(3, 10, sink=1, recent=8)
    assert chosen(selector.keys(scores)) == [0, 40, 85]
    assert chosen(VerticalSlashTopK(30, 50, sink=1, recent=8, released=True).keys(scores))[-3:] == [85, 90, 95]
    own = torch.arange(96)
    spared = kept_pairs(selector(scores))[0, 0][:, 88:]
    assert bool(spared[own[:, None] >= own[88:]].all())  # every query that sees them keeps them
    # Two distances spare two keys.
    assert chosen(VerticalSlashTopK(3, 2, sink=1, recent=8).keys(scores)) == [0, 40, 90]


def test_budgets_per_head() -> None:
    scores = scores_of(96, vertical=[40, 50, 60], slash=[30, 20, 25], Hq=2)
    selector = VerticalSlashTopK([1, 2], [2, 1], sink=0, recent=1)
    assert [chosen(selector.keys(scores), h) for h in range(2)] == [[40], [40, 50]]
    assert [chosen(selector.distances(scores), h) for h in range(2)] == [[0, 30], [0]]


def slow_tiles(distances: list[int], rows: int, b: int) -> list[set[int]]:
    """Columns that the released tiles touch in each row: ranges grow by whole tiles, one distance at a time."""
    touched = []
    for row in range(rows):
        end_of_row = (row + 1) * b
        ranges: list[list[int]] = []
        for distance in sorted((d for d in distances if d < end_of_row), reverse=True):
            end = max(end_of_row - distance, b)
            if not ranges or end > ranges[-1][1] + b:
                ranges.append([end - b, end])
            elif end > ranges[-1][1]:
                ranges[-1][1] += b
        touched.append({key // b for start, stop in ranges for key in range(start, stop)})
    return touched


@pytest.mark.parametrize("M", [115, 60])
def test_released_tiles_against_a_loop(M: int) -> None:
    N, generator = 115, torch.Generator().manual_seed(0)
    distances = torch.rand(1, 8, N, generator=generator) < torch.linspace(0.01, 0.3, 8).view(1, 8, 1)
    distances[..., 0] = True
    scores = scores_of(N, vertical=[0], slash=[0], Hq=8, M=M)
    tiles = _tiles(scores, distances)
    for head in range(8):
        slow = slow_tiles(distances[0, head].nonzero().flatten().tolist(), 8, B16)[-scores.grid.rows :]
        for row, columns in enumerate(slow):
            assert set(tiles[0, head, row].nonzero().flatten().tolist()) == {c for c in columns if c < 8}
    late = (tiles & ~scores.blocks_at(distances) & scores.grid.visible).sum()
    assert int(late) > 0  # or the case shows nothing


# A-shape and tri-shape.


def test_a_shape_and_tri_shape_by_hand() -> None:
    q, k, v = make_qkv(N=96, D=16)
    a = a_shape(17, 16, block=B16, executor=reference).trace(q, k, v).mask
    assert [kept(a, row) for row in range(6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 4, 5]]
    own = a_shape(1, 1, block=B16, executor=reference).trace(q, k, v).mask
    assert [kept(own, row) for row in range(6)] == [[0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5]]
    tri = tri_shape(1, 1, 17, block=B16, executor=reference).trace(q, k, v).mask
    assert [kept(tri, row) for row in range(6)] == [[0], [0, 1], [0, 2], [0, 3], [*range(5)], [*range(6)]]


def test_last_queries() -> None:
    q, k, v = make_qkv(M=40, N=83, D=16)
    for tokens, causal, rows in (
        (19, True, [False, False, True, True]),
        (20, True, [False, True, True, True]),  # of the second row its last query
        (19, False, [False, True, True]),
    ):
        keep = bs.Pipeline(bs.Identity(), bs.NoScorer(B16), LastQueries(tokens), reference).trace(
            q, k, v, causal=causal
        )
        visible = keep.mask.grid.visible.expand_as(keep.mask.keep)
        assert (keep.mask.keep == visible).all(-1)[0, 0].tolist() == rows
    # Rows lie on the grid of the prompt, and the last 20 queries begin at 63: on tiles of 4, the last six rows.
    fine = bs.Pipeline(bs.Identity(), bs.NoScorer(B16), bs.OnTiles(LastQueries(20), 4), reference).trace(q, k, v)
    assert int((fine.mask.keep == fine.mask.grid.visible).all(-1)[0, 0].sum()) == 6

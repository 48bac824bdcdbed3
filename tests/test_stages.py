"""Known answers, small enough to check by hand."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.kernels.common.sizes import HeadMask
from blocksparse.pipeline_core import EVERYTHING
from blocksparse.select.selector import Selector
from blocksparse.testing import every_preset, make_qkv
from tests.specs import asked, grid_of, kept
from tests.stages import SELECTORS

B16 = 16


def grid(rows: int, *, causal: bool = False, heads: int = 1, kv_heads: int = 1) -> bs.Grid:
    """`rows` x `rows` blocks of 16 in original order."""
    q, k = torch.zeros(1, heads, rows * B16, 8), torch.zeros(1, kv_heads, rows * B16, 8)
    return grid_of(q, k, B16, causal=causal)


def mass(*row: float, forced: list[int] | None = None) -> bs.BlockMass:
    """One head in which every row of blocks has these values, not causal."""
    values = torch.tensor(row).expand(1, 1, len(row), len(row)).contiguous()
    keep = torch.zeros_like(values, dtype=torch.bool)
    keep[..., forced or []] = True
    return bs.BlockMass(values, grid(len(row)), keep if forced else None)


@pytest.mark.parametrize(
    ("target", "crossing", "expected"),
    [
        (0.5, True, [0]), (0.5, False, [0]),
        (0.79, True, [0, 1]), (0.79, False, [0]),
        (0.8, False, [0, 1]),
        (0.9, True, [0, 1, 2]), (0.9, False, [0, 1]),
        (1.0, True, [0, 1, 2]), (1.0, False, [0, 1, 2]), (1, True, [0, 1, 2]),
        (0.9999999, True, [0, 1, 2]),
        (0.2, True, [0]), (0.2, False, [0]),  # one block above the target is kept either way
    ],
)  # fmt: skip
def test_top_cdf_boundary(target: float, crossing: bool, expected: list[int]) -> None:
    assert kept(bs.TopCdf(target, crossing=crossing)(mass(0.5, 0.3, 0.2))) == expected


def test_top_cdf_counts_forced_blocks_first() -> None:
    """XAttention's rule; PBS-Attn's is a union after selection."""
    forced = mass(0.5, 0.3, 0.15, 0.05, forced=[2])
    assert kept(bs.TopCdf(0.6)(forced)) == [0, 2]  # .15 + .5 reaches .6
    plain = mass(0.5, 0.3, 0.15, 0.05)
    assert kept(bs.TopCdf(0.6)(plain)) == [0, 1]
    assert kept(bs.TopCdf(0.1)(forced)) == [2]
    assert kept(bs.TopCdf(0.1, crossing=False)(forced)) == [0, 2]  # and the heaviest scored block (SpargeAttn)


def test_ties_go_to_the_lower_column() -> None:
    assert kept(bs.TopCdf(0.5)(mass(0.25, 0.25, 0.25, 0.25))) == [0, 1]
    assert kept(bs.TopK(3)(mass(0.25, 0.25, 0.25, 0.25))) == [0, 1, 2]


def test_top_cdf_per_head() -> None:
    values = torch.tensor([0.5, 0.3, 0.2]).expand(1, 2, 3, 3)
    mask = bs.TopCdf([0.4, 0.9])(bs.BlockMass(values, grid(3, heads=2, kv_heads=2)))
    assert (kept(mask, head=0), kept(mask, head=1)) == ([0], [0, 1, 2])


def test_top_k_counts_the_diagonal_first() -> None:
    scores = bs.BlockScores(torch.tensor([5.0, 4.0, 3.0, 2.0]).expand(1, 1, 4, 4), grid(4, causal=True))
    mask = bs.TopK(2)(scores)
    assert [kept(mask, row) for row in range(4)] == [[0], [0, 1], [0, 2], [0, 3]]
    assert [kept(bs.TopK(share=0.5)(scores), row) for row in range(4)] == [[0], [1], [0, 2], [0, 3]]


def test_threshold_is_strict() -> None:
    assert kept(bs.Threshold(0.3)(mass(0.5, 0.3, 0.2))) == [0]


def test_patterns() -> None:
    scores = bs.BlockScores(torch.zeros(1, 1, 4, 4), grid(4, causal=True))
    assert [kept(bs.Band(0)(scores), row) for row in range(4)] == [[0], [1], [2], [3]]
    assert [kept(bs.Band(1)(scores), row) for row in range(4)] == [[0], [0, 1], [1, 2], [2, 3]]
    assert [kept(bs.Band(2 * B16)(scores), row) for row in range(4)] == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert [kept(bs.Sink()(scores), row) for row in range(4)] == [[0], [0, 1], [0, 2], [0, 3]]
    assert [kept(bs.Sink(B16 + 1)(scores), row) for row in range(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    both_sides = bs.Band(1)(bs.BlockScores(torch.zeros(1, 1, 4, 4), grid(4)))
    assert [kept(both_sides, row) for row in range(4)] == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]


class ByScores(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A rule that does not say it is one of position, so that its mask is made by itself."""

    def __init__(self, rule: bs.Selector[bs.BlockScores, bs.BlockMask]) -> None:
        self.rule = rule

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return self.rule(scores)


def apart(*rules: bs.Selector[bs.BlockScores, bs.BlockMask]) -> bs.Selector[bs.BlockScores, bs.BlockMask]:
    """Their union, one mask after the other."""
    return reduce(or_, (ByScores(rule) for rule in rules))


@pytest.mark.parametrize("causal", [True, False])
def test_rules_of_position_join(causal: bool) -> None:
    """As one rule and on top of a choice by scores; also two of a kind, of which a kernel takes one."""
    rules = [
        bs.Band(3), bs.Stride(4) | bs.Band(40), bs.Sink(1), bs.Sink(50), bs.Stride(3, 5),
        bs.Stride(5, released=True), bs.Random([0.1, 0.2, 0.3, 0.4]),
    ]  # fmt: skip
    scores = bs.BlockMass(torch.rand(1, 4, 9, 9), grid(9, heads=4, kv_heads=2, causal=causal))
    united = reduce(or_, rules)
    assert isinstance(united, bs.PositionSelector)
    assert torch.equal(united(scores).keep, apart(*rules)(scores).keep)
    for inner in (bs.TopCdf(0.3), bs.SharedByGroup(bs.TopCdf(0.3))):
        for rule in (bs.Band(3) | bs.Sink(1), united):
            mine: bs.Selector[bs.BlockScores, bs.BlockMask] = apart(rule)
            if isinstance(inner, bs.SharedByGroup):
                mine = bs.SharedByGroup(mine)
            assert torch.equal((inner | rule)(scores).keep, (inner | mine)(scores).keep)
            assert torch.equal((rule | inner)(scores).keep, (inner | mine)(scores).keep)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("orders", [0, 2, 4])
@pytest.mark.parametrize("M", [160, 37])
def test_finer_blocks_of_a_rule_join(M: int, orders: int, shared: bool, causal: bool) -> None:
    """With one order of keys for all heads, and one for each group or each head."""
    q, k, _ = make_qkv(N=160, M=M, Hq=4, Hkv=2, D=8)
    order = torch.rand(1, orders, 1, 160, generator=torch.Generator().manual_seed(0)).argsort(-1).int()
    permutation = bs.GlobalPermutation(order if orders else None)
    scores = bs.FlattenMaxPoolScorer(32, 8)(q, k, permutation, bs.AttentionSpec(scale=1.0, causal=causal))
    inner: bs.Selector[bs.BlockMass, bs.BlockMask] = bs.TopCdf(0.5)
    inner = bs.SharedByGroup(inner) if shared else inner
    several = bs.Band(9) | bs.Sink() | bs.Stride(3) | bs.Random([0.1, 0.2, 0.3, 0.4]) | bs.Band(2)
    for rule in (bs.Stride(2), several):
        mine = apart(bs.OnTiles(rule, 4))
        mine = bs.SharedByGroup(mine) if shared else mine
        mask = (bs.Refined(inner, 4) | bs.OnTiles(rule, 4))(scores)
        assert torch.equal(mask.keep, (bs.Refined(inner, 4) | mine)(scores).keep)
        twice = bs.Refined(bs.Refined(inner, 2), 2) | bs.OnTiles(rule, 4)
        assert torch.equal(twice(scores).keep, mask.keep)


OFFERING = [
    rule for rule in SELECTORS if rule.traits not in (bs.SelectorTraits(), bs.SelectorTraits(reads_values=False))
]


@pytest.mark.parametrize("rule", OFFERING, ids=repr)
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_selector_offers_changes_no_mask(rule: Any, causal: bool) -> None:
    """One launch keeps what several keep: blocks of a position, another mask, some heads."""
    q, k, _ = make_qkv(N=160, Hq=4, Hkv=2, D=8)
    scores = bs.VerticalSlashScorer(16)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0, causal=causal))
    alone, by_position = rule(scores), (bs.Band(9) | bs.Sink(1))(scores)
    if rule.traits.always:
        both = rule(scores, always=bs.AlwaysKept(near=9, first=1))
        assert torch.equal(both.keep, (alone | by_position).keep)
    if rule.traits.mask:
        other = bs.TopK(2)(scores).refine(scores.grid.q_block // alone.grid.q_block)
        assert torch.equal(rule(scores, mask=other).keep, (alone | other).keep)
    if rule.traits.heads:
        heads = HeadMask(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64))
        assert torch.equal(rule(scores, heads=heads).keep[:, 1:3], alone.keep[:, 1:3])
        assert torch.equal(rule(scores, heads=heads.rest()).keep[:, ::3], alone.keep[:, ::3])


@pytest.mark.parametrize("cols", [6, 8, 16])
@pytest.mark.parametrize("heads", [1, 4])
def test_union_and_intersection_of_masks(cols: int, heads: int) -> None:
    """Whether or not rows are whole words, and one choice stands for all heads."""
    where = grid(cols, heads=4, kv_heads=2)
    generator = torch.Generator().manual_seed(cols)
    one, other = (torch.rand(1, n, cols, cols, generator=generator) < 0.4 for n in (heads, 1))
    a, b = (bs.BlockMask(keep.expand(1, 4, -1, -1), where) for keep in (one, other))
    assert torch.equal((a | b).keep, (one | other).expand(1, 4, -1, -1))
    assert torch.equal((a & b).keep, (one & other).expand(1, 4, -1, -1))
    assert ((a | b).keep.stride(1) == 0) == (heads == 1)


def test_shared_by_group_is_the_union() -> None:
    values = torch.eye(4).view(1, 4, 1, 4).expand(1, 4, 4, 4)
    mask = bs.SharedByGroup(bs.TopCdf(0.5))(bs.BlockMass(values, grid(4, heads=4, kv_heads=2)))
    assert mask.keep.shape == (1, 2, 4, 4)
    assert (kept(mask, head=0), kept(mask, head=1)) == ([0, 1], [2, 3])
    assert mask.per_query_head().shape == (1, 4, 4, 4)


@pytest.mark.parametrize("start", [0, 5, 16, 24, 33])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_refine_keeps_the_same_pairs(start: int, n: int) -> None:
    q, k, v = make_qkv(Hq=2, Hkv=1, N=75, D=16)
    fronts: tuple[tuple[Any, Any, Any], ...] = (
        (bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(0.4)),
        (bs.SegmentKeySort(32, last_q=8), bs.MeanPoolScorer(16), bs.TopCdf(0.4)),
        (bs.GlobalIndexMap(64, prefix=40), bs.NoScorer(16), bs.Ranked(bs.Everything())),  # with empty slots
    )
    for front in fronts:
        trace = bs.Pipeline(*front, bs.ReferenceExecutor()).trace(q[:, :, start:], k, v)
        fine = trace.mask.refine(n)
        again = bs.ReferenceExecutor()(q[:, :, start:], k, v, fine, asked(fine, trace.spec.scale))
        torch.testing.assert_close(again.out, trace.output.out)
        assert fine.keep.shape[2:] == (fine.grid.rows, fine.grid.cols)


def test_a_causal_last_q_does_not_vote_on_the_future() -> None:
    k = torch.zeros(1, 1, 4, 1)
    k[0, 0, 3] = 5.0
    q = torch.ones(1, 1, 4, 1)
    order = bs.SegmentKeySort(2, last_q=4)
    specs = (bs.AttentionSpec(scale=1.0, causal=causal) for causal in (True, False))
    assert not torch.equal(*(order._importance(q, k, spec) for spec in specs))


def test_permutation_round_trip() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 5, generator=generator)
    index = torch.rand(2, 3, 40, generator=generator).argsort(-1).int()
    permutation = bs.GlobalPermutation(index.unsqueeze(2), index)
    assert torch.equal(permutation.restore(permutation.gather_queries(x)), x)
    back = permutation.inverse()
    assert torch.equal(back.gather_keys(permutation.gather_keys(x)), x)
    in_place = bs.GlobalPermutation()
    assert in_place.gather_keys(x) is x
    assert in_place.restore(x) is x


@pytest.mark.parametrize("heads", [4, 2], ids=["query heads", "KV heads"])
@pytest.mark.parametrize("kept", [4, 2], ids=["query heads", "KV heads"])
def test_density_counts_the_slots_of_each_head(heads: int, kept: int) -> None:
    """Each head of each prompt drops some keys; a slot costs what it costs, wherever others have theirs."""
    q, k, _ = make_qkv(B=2, Hq=4, Hkv=2, N=64, D=16)
    index = torch.arange(64, dtype=torch.int32).expand(2, heads, 2, -1).contiguous()
    for b in range(2):
        for h in range(heads):
            index[b, h, :, 64 - 7 * h - 3 * b :] = -1
    grid = grid_of(q, k, B16, permutation=bs.Permutation(index, group=32))
    mask = bs.BlockMask(torch.ones(2, kept, 4, 4, dtype=torch.bool), grid)
    slots = torch.stack([(mask.slots(row) >= 0).sum((-1, -2)) for row in range(4)]).sum(0)  # [B, Hq]
    density = mask.density().repeat_interleave(4 // max(heads, kept), 1)
    assert torch.equal(density, slots.double() / (16 + 32 + 48 + 64))


def test_a_trace_asks_once_what_was_visited() -> None:
    q, k, v = make_qkv(N=64, D=16)
    trace = bs.Pipeline(bs.Identity(), bs.NoScorer(16), bs.Everything(), bs.ReferenceExecutor()).trace(q, k, v)
    asked = []

    def visited() -> bs.BlockMask:
        asked.append(1)
        return trace.mask

    trace = evolve(trace, output=bs.AttentionOutput(trace.output.out, trace.output.lse, visited))
    trace.density(), trace.covered_mass(), trace.error()
    assert asked == [1]


def test_a_rule_of_position_says_where_alone() -> None:
    with pytest.raises(TypeError, match="Mine has its own __call__, which unions would not call"):

        class Mine(bs.PositionSelector):
            def where(self, grid: bs.Grid) -> Tensor:
                return grid.visible

            def __call__(self, scores: bs.BlockScores, *, mask: bs.BlockMask | None = None) -> bs.BlockMask:
                return super().__call__(scores, mask=mask)


def test_a_mask_of_kv_heads_lies_on_a_shared_grid() -> None:
    """Whoever made it: bounds of blocks hold for all query heads of a group."""
    q, k, v = make_qkv(N=100, D=16)
    order = bs.SegmentKeySort(32, last_q=16)(q, k, bs.AttentionSpec(scale=0.25))
    cut = grid_of(q, k, 16, permutation=order)
    keep = cut.visible.expand(1, 4, -1, -1).unflatten(1, (2, 2)).any(2)
    mask = bs.BlockMask(keep, cut)
    got, want = (e(q, k, v, mask, asked(mask, 0.25)).out for e in (bs.CpuExecutor(), bs.ReferenceExecutor()))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("N", [32, 128])
@pytest.mark.parametrize("rule", [bs.Band(3), bs.VerticalSlashCdf(0.5)], ids=repr)
def test_a_rule_joins_masks_of_the_blocks_of_its_scores_alone(rule: Any, N: int) -> None:
    q, k, _ = make_qkv(N=N, D=16)
    scores = bs.VerticalSlashScorer(32)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25))
    with pytest.raises(ValueError, match="share a grid"):
        (bs.Refined(bs.GlobalTopCdf(0.5), 2) | rule)(scores)


# Selectors that know from sizes alone that they keep everything: what they say is true, and they do say it


N, M = 200, 70
SURE: dict[str, tuple[Any, Any]] = {  # what says so for N keys, and the same with one token less, or a little less
    "everything": (bs.Everything(), None),
    "band": (bs.Band(N - 1), bs.Band(N - 2)),
    "sink": (bs.Sink(N), bs.Sink(N - 1)),
    "last queries": (bs.LastQueries(M), bs.LastQueries(M - 1)),
    "last keys": (bs.LastKeys(N), bs.LastKeys(N - 1)),
    "stride": (bs.Stride(1), bs.Stride(2)),
    "positions": (bs.Band(3) | bs.Sink(N), bs.Band(3) | bs.Sink(3)),
    "first and near": (bs.Band(N - 9) | bs.Stride(50) | bs.Sink(8), bs.Band(N - 9) | bs.Stride(50) | bs.Sink(7)),
    "mass": (bs.TopCdf(1), bs.TopCdf(0.99)),
    "mass of a head": (bs.TopCdf([1.0, 1.0]), bs.TopCdf([1.0, 0.9])),
    "mass of all rows": (bs.GlobalTopCdf(1), bs.GlobalTopCdf(0.99)),
    "share": (bs.TopK(share=1), bs.TopK(share=0.99)),
    "number": (bs.TopK(N), bs.TopK(N - 1)),
    "distances": (bs.VerticalSlashTopK(1, N), bs.VerticalSlashTopK(1, N - 1)),
    "columns": (bs.VerticalSlashCdf(0.5, min_budget=N), bs.VerticalSlashCdf(0.5, min_budget=N - 1)),
    "either": (bs.TopCdf(0.3) | bs.Sink(N), bs.TopCdf(0.3) | bs.Sink(3)),
    "both": (bs.TopCdf(1) & bs.Sink(N), bs.TopCdf(1) & bs.Sink(N - 1)),
    "shared": (bs.SharedByGroup(bs.TopCdf(1)), bs.SharedByGroup(bs.TopCdf(0.9))),
    "refined": (bs.Refined(bs.TopCdf(1), 2), bs.Refined(bs.TopCdf(0.9), 2)),
    "tiles": (bs.Refined(bs.TopCdf(0.1), 2) | bs.OnTiles(bs.Sink(N), 2), None),
    "ranked": (bs.Ranked(bs.TopCdf(1)), bs.Ranked(bs.TopCdf(0.9), first=bs.Band(5))),
    "ranked first": (bs.Ranked(bs.TopCdf(0.9), first=bs.Band(N)), None),
    "routed": (
        bs.RoutedByDivergence(0.1, bs.GlobalTopCdf(1), bs.Everything()),
        bs.RoutedByDivergence(0.1, bs.GlobalTopCdf(1), bs.Sink(1)),
    ),
    "by causality": (
        bs.SelectorByCausality(bs.TopCdf(1), bs.TopCdf(0.5)),
        bs.SelectorByCausality(bs.TopCdf(0.5), bs.TopCdf(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SURE)
def test_what_they_say_is_true(name: str) -> None:
    sure, less = SURE[name]
    assert sure.keeps_everything(M, N, causal=True)
    assert less is None or not less.keeps_everything(M, N, causal=True)
    said = 0
    for selector in filter(None, (sure, less)):
        calls = ((M, N, True), (N, N, True), (M, N, False), (N, M, False), (N - 1, N - 1, True))
        for queries, keys, causal in calls:
            q = make_qkv(N=queries, Hq=2, Hkv=1, D=16)[0]
            k = make_qkv(N=keys, Hq=2, Hkv=1, D=16, seed=1)[1]
            if selector.keeps_everything(queries, keys, causal=causal):
                said += 1
                assert _keeps(selector, q, k, causal)
                q[:, :, ::7], k[:, :, ::5] = float("nan"), float("inf")
                assert _keeps(selector, q, k, causal, window=40 if causal else None)
    assert said >= 2


def _keeps(
    selector: Selector[Any, Any], q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None = None
) -> bool:
    pipeline = bs.Pipeline(bs.Identity(), bs.VerticalSlashScorer(16), selector, bs.ReferenceExecutor())
    mask = pipeline.choose(q, k, causal=causal, window=window).mask
    return torch.equal(mask.keep, mask.grid.visible.expand_as(mask.keep))


@pytest.mark.parametrize("dense_below", [None, 1e12], ids=["keeps everything", "little work"])
def test_numbers_of_other_heads_are_refused_in_a_dense_call(dense_below: float | None) -> None:
    q, k, v = make_qkv(N=N, Hq=4, Hkv=2, D=16)
    for selector in (bs.TopCdf([1.0] * 3), bs.Band(N) | bs.TopCdf([1.0] * 3)):
        pipeline = bs.Pipeline(
            bs.Identity(), bs.MeanPoolScorer(16), selector, bs.AutoExecutor(dense_below=dense_below)
        )
        with pytest.raises(ValueError, match=r"TopCdf: 'mass' has 3 entries for 4 query heads\. Give one"):
            pipeline(q, k, v)
        evolve(pipeline, selector=bs.TopCdf([1.0] * 4))(q, k, v)


def test_a_call_is_then_dense_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(N=N, Hq=2, Hkv=1, D=16)
    pipeline = every_preset["minference"](20, N, block=16)
    trace = pipeline.trace(q, k, v)
    assert trace.dense_because == EVERYTHING
    # No work is too much for that, so the demo, which asks for masks however short a prompt, is dense as well.
    assert evolve(pipeline, executor=bs.AutoExecutor(dense_below=0)).dense_because(q, k, v, trace.spec) is not None
    shorter, given = (every_preset["minference"](20, N - 1, block=16), evolve(pipeline, executor=bs.CpuExecutor()))
    assert shorter.trace(q, k, v).dense_because is given.trace(q, k, v).dense_because is None

    def stage_runs(*_: object, **__: object) -> None:
        raise AssertionError("a stage runs")

    monkeypatch.setattr(bs.VerticalSlashScorer, "__call__", stage_runs)
    torch.testing.assert_close(pipeline(q, k, v), dense_attention(q, k, v, bs.AttentionSpec(scale=0.25)))
    with pytest.raises(AssertionError, match="a stage runs"):
        shorter(q, k, v)


@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
def test_density_is_the_same_count_everywhere(preset: Any, device: str) -> None:
    """Pairs in visited blocks over the pairs that dense attention visits, a tail by its tokens."""
    q, k, v = make_qkv(N=1000, D=32)
    trace = preset(executor=bs.ReferenceExecutor()).trace(q, k, v)
    grid, keep = trace.visited.grid, trace.visited.per_query_head()
    kept = torch.zeros(keep.shape[:2], dtype=torch.float64)
    dense = 0
    for row in range(grid.rows):
        slots, queries = trace.visited.slots(row), trace.visited.queries(row).shape[-1]
        kept += queries * (keep[:, :, row] * (slots >= 0).sum(-1)).sum(-1)
        row_end = min((row + 1) * grid.q_block, 1000)
        dense += queries * min(-(-row_end // grid.k_block) * grid.k_block, 1000)
    torch.testing.assert_close(trace.density(), kept / dense)
    if isinstance(trace.permutation, bs.GlobalPermutation):
        there = grid_of(q.to(device), k.to(device), grid.q_block, grid.k_block)
        moved = bs.BlockMask(trace.visited.keep.to(device), there)
        assert torch.equal(moved.density().cpu(), trace.visited.density())

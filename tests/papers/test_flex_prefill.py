"""FlexPrefill against the authors' code; its stages against known answers and against slow ones."""

from __future__ import annotations

import math
from typing import Any, final

import attrs
import pytest
import torch
from tests.papers.golden_cases import assert_same_output, cases, differing, load
from tests.specs import grid_of, kept, kept_pairs
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.score import last_queries
from blocksparse.kernels.score.block_softmax import block_divergence
from blocksparse.presets.text import flex_prefill
from blocksparse.score.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.select.mass import GlobalTopCdf
from blocksparse.select.vertical_slash import RoutedByDivergence, VerticalSlashCdf
from blocksparse.testing import make_qkv

FLEX = cases("flex")
B16 = 16


def flex(name: str, *, as_released: bool) -> bs.Trace[bs.GlobalPermutation, VerticalSlashScores, bs.BlockMask]:
    case = load(name)
    params = case.params
    # The authors' None is 1.
    how: Any = {"min_budget": 1, "as_released": as_released, "executor": bs.ReferenceExecutor()}
    pipeline = flex_prefill(params["gamma"], params["tau"], block=params["block_size"], **how)
    return pipeline.trace(case.q, case.k, case.v)


@pytest.mark.parametrize("name", FLEX)
def test_flex_prefill_mask_and_scores(name: str) -> None:
    case, trace = load(name), flex(name, as_released=True)
    assert differing(trace.mask, case).tolist() == []
    if torch.equal(trace.mask.keep, torch.from_numpy(case.arrays["mask"])):
        assert_same_output(trace.output.out, case)
    scores = trace.scores
    golden = {key: torch.from_numpy(case.arrays[key]) for key in ("vertical", "slash", "js", "vertical_block")}
    torch.testing.assert_close(scores.vertical, golden["vertical"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scores.slash.flip(-1), golden["slash"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scores.mass_of_columns(), golden["vertical_block"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scores.divergence, golden["js"], rtol=0, atol=1e-6)
    query_aware = torch.from_numpy(case.arrays["query_aware"])
    assert torch.equal(scores.divergence < case.params["tau"], query_aware)


@pytest.mark.parametrize("name", FLEX)
def test_flex_prefill_default_keeps_what_it_says(name: str) -> None:
    """gamma of the last queries' mass in vertical-slash heads, gamma of the pooled mass in the others."""
    ours, gamma = flex(name, as_released=False), load(name).params["gamma"]
    query_aware = ours.scores.divergence < load(name).params["tau"]
    pooled = (ours.scores.values * ours.mask.keep).sum((-1, -2)) / ours.scores.grid.rows
    assert bool((pooled[query_aware] >= gamma - 1e-6).all())
    covered = covered_by_last_queries(ours, ours.scores.grid.q_block)
    assert bool((covered[~query_aware] >= gamma - 1e-6).all())


# The scorer.


def slow_lines(q: Tensor, k: Tensor, P: int, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Pair by pair, in Python."""
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    vertical, slash = torch.zeros(B, Hq, N), torch.zeros(B, Hq, N if causal else max(M, N))
    keys = k.repeat_interleave(Hq // Hkv, dim=1)
    for i in range(M - P, M):
        position = i + N - M if causal else i
        seen = position + 1 if causal else N
        weight = (keys[:, :, :seen] @ q[:, :, i, :, None] * scale).squeeze(-1).softmax(-1) / P
        for j in range(seen):
            vertical[:, :, j] += weight[:, :, j]
            slash[:, :, abs(position - j)] += weight[:, :, j]
    return vertical, slash


@pytest.mark.parametrize("workspace", [2**28, 1])
@pytest.mark.parametrize(("M", "N"), [(83, 83), (60, 83), (10, 83), (1, 20), (90, 50)])
@pytest.mark.parametrize("causal", [True, False])
def test_lines_against_a_loop(
    M: int, N: int, causal: bool, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch, GQA, chunks, tails, both directions, and the last queries taken in pieces."""
    if causal and M > N:
        pytest.skip("no such call")
    monkeypatch.setattr(last_queries, "_WORKSPACE", workspace)
    q = make_qkv(B=2, Hq=4, Hkv=2, N=M, D=8)[0]
    k = make_qkv(B=2, Hq=4, Hkv=2, N=N, D=8, seed=1)[1]
    scores = VerticalSlashScorer(B16)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.3, causal=causal))
    vertical, slash = slow_lines(q, k, min(B16, M), causal=causal, scale=0.3)
    torch.testing.assert_close(scores.vertical, vertical)
    torch.testing.assert_close(scores.slash, slash)
    torch.testing.assert_close(scores.slash.sum(-1), torch.ones(2, 4))


@pytest.mark.parametrize("M", [83, 60])
def test_values_are_those_of_mean_pooling(M: int) -> None:
    q, k, v = make_qkv(M=M, N=83, D=16)
    for S in (None, 20):  # segments of whole blocks would be left out of the softmax
        permuter: bs.Permuter[bs.GlobalPermutation] = (
            bs.Identity() if S is None else bs.SegmentKeySort(S, last_q=8)
        )
        both = [
            bs.Pipeline(permuter, scorer, bs.Everything(), bs.ReferenceExecutor()).trace(q, k, v).scores.values
            for scorer in (VerticalSlashScorer(B16), bs.MeanPoolScorer(B16))
        ]
        torch.testing.assert_close(*both)
    bare = VerticalSlashScorer(B16, pooled=False)(
        q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25)
    ).values
    assert bool((bare == 0).all())
    assert bare.shape == both[0].shape


@pytest.mark.parametrize("tau", [0.0, 0.3, [0.2, 0.5, 0.0, 1.0]])
@pytest.mark.parametrize("M", [200, 50])
def test_values_only_where_the_rule_asks_for_them(M: int, tau: float | list[float]) -> None:
    """The same masks, and values of other heads are 0; a rule with another bound is refused."""
    q, k, v = make_qkv(B=2, Hq=4, Hkv=2, M=M, N=200, D=16)
    q[:, 1] *= 8.0  # pooling does not describe it
    rule = RoutedByDivergence(
        tau, similar=GlobalTopCdf(0.8) | VerticalSlashCdf(0.0, min_budget=20), otherwise=VerticalSlashCdf(0.6)
    )
    parts = bs.Identity(), VerticalSlashScorer(B16), rule, bs.ReferenceExecutor()
    whole = bs.Pipeline(*parts).trace(q, k, v)
    spared = bs.Pipeline(parts[0], VerticalSlashScorer(B16, tau=tau), *parts[2:]).trace(q, k, v)
    assert torch.equal(spared.mask.keep, whole.mask.keep)
    assert torch.equal(spared.scores.divergence, whole.scores.divergence)
    below = whole.scores.divergence < torch.tensor(tau)
    assert torch.equal(spared.scores.values, whole.scores.values * below[..., None, None])
    if not isinstance(tau, float) or tau > 0:
        assert 0 < int(below.sum()) < below.numel()
    with pytest.raises(ValueError, match="Give both the same"):
        RoutedByDivergence(0.25, similar=rule.similar, otherwise=rule.otherwise)(spared.scores)


@final
@attrs.frozen(eq=False)
class Own(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A rule from elsewhere, which does not say whether it looks at values."""

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.TopK(2)(scores)


@final
@attrs.frozen(eq=False)
class Blind(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A rule from elsewhere, which looks at no value."""

    traits = bs.SelectorTraits(reads_values=False)

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.Band(8)(scores)


def test_a_selector_that_asks_for_every_head_is_refused() -> None:
    """It would see no more than zeros in heads that the scorer leaves out."""
    pipeline, other = (bs.flex_prefill(0.8, tau=tau, block=16) for tau in (0.2, 0.3))
    mine = pipeline.selector
    assert isinstance(mine, RoutedByDivergence)
    by_mass = bs.TopCdf(0.9)
    for selector in (
        by_mass,
        bs.SharedByGroup(by_mass),
        other.selector,
        mine | by_mass,
        mine & by_mass,
        bs.Ranked(mine),
        RoutedByDivergence(0.2, similar=mine.similar, otherwise=by_mass),
        bs.SelectorByCausality(mine, by_mass),
        Blind() | Own(),
        Own(),
    ):
        with pytest.raises(ValueError, match=r"looks at others. Give a scorer without 'tau', or a RoutedBy"):
            attrs.evolve(pipeline, selector=selector)
        bs.Pipeline(bs.Identity(), VerticalSlashScorer(16), selector, bs.ReferenceExecutor())
    for same in (
        Blind(),
        Blind() | mine,
        bs.SharedByGroup(mine),
        mine | bs.Sink(),
        bs.Refined(mine, 2) | bs.OnTiles(bs.Band(8), 2),
    ):
        attrs.evolve(pipeline, selector=same)


def test_a_scorer_that_leaves_heads_out_is_known_inside_another() -> None:
    spared = VerticalSlashScorer(16, tau=0.0)
    for scorer in (
        bs.ScorerByCausality(spared, bs.MeanPoolScorer(16)),
        bs.ScorerByCausality(bs.MeanPoolScorer(16), spared),
        bs.ScorerPair(bs.MeanPoolScorer(16), spared),
        bs.SimilarityGatedScorer(spared, 0.5),
    ):
        assert scorer.traits.values_below == 0.0
        with pytest.raises(ValueError, match="divergence is below 'tau' alone"):
            bs.Pipeline(bs.Identity(), scorer, bs.TopK(2), bs.ReferenceExecutor())
    assert VerticalSlashScorer(16, tau=0.1, pooled=False).traits.values_below is None


def test_divergence_is_never_nan() -> None:
    same, other = torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.0, 0.5])
    logits = same.log().view(1, 1, -1)
    assert float(block_divergence(logits, same.view(1, 1, -1))) == 0.0
    assert float(block_divergence(logits, other.view(1, 1, -1))) == pytest.approx(math.sqrt(math.log(2)))
    q, k, _ = make_qkv(N=64, D=16)
    k[:, :, :B16] = -100 * q.mean((1, 2), keepdim=True)  # weights of this block underflow to 0
    scores = VerticalSlashScorer(B16)(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0))
    assert bool((scores.mass_of_columns()[..., 0] == 0).any())
    assert bool(scores.divergence.isfinite().all())


# What vertical-slash heads keep.


def covered_by_last_queries(trace: bs.Trace[Any, Any, Any], last_q: int) -> Tensor:
    """Share of the last queries' true attention that lies on kept pairs, `[B, Hq]`."""
    N, P = trace.k.shape[2], min(last_q, trace.q.shape[2])
    keys = trace.k.repeat_interleave(trace.q.shape[1] // trace.k.shape[1], dim=1)
    logits = (trace.q[:, :, -P:] @ keys.transpose(-1, -2)).double() * trace.spec.scale
    if trace.mask.grid.causal:
        logits = logits.masked_fill(torch.arange(N) > torch.arange(N - P, N)[:, None], float("-inf"))
    return (logits.softmax(-1) * kept_pairs(trace.mask)[:, :, -P:]).sum((-1, -2)) / P


def lines(
    N: int, *, vertical: Tensor | None = None, slash: Tensor | None = None, causal: bool = True
) -> VerticalSlashScores:
    """Scores of as many heads as `vertical` or `slash` `[Hq, N]` has; what is not given lies on the first line."""
    given = vertical if vertical is not None else slash
    assert given is not None
    Hq = given.shape[0]
    q, k = torch.zeros(1, Hq, N, 8), torch.zeros(1, 1, N, 8)
    grid = grid_of(q, k, B16, causal=causal)
    first = torch.zeros(Hq, N)
    first[:, 0] = 1.0
    values, divergence = torch.zeros(1, Hq, grid.rows, grid.cols), torch.ones(1, Hq)
    vertical, slash = ((first if x is None else x).unsqueeze(0) for x in (vertical, slash))
    return VerticalSlashScores(values, grid, vertical=vertical, slash=slash, divergence=divergence)


def test_distances_go_both_ways_when_not_causal() -> None:
    slash = torch.zeros(1, 64)
    slash[0, 16] = 1.0
    scores = lines(64, slash=slash, causal=False)
    at = scores.blocks_at(scores.slash > 0)[0, 0]
    assert torch.equal(at, torch.eye(4).roll(1, 1).bool().triu(1) | torch.eye(4).roll(-1, 1).bool().tril(-1))


def test_budgets_and_forced_blocks() -> None:
    """Forced blocks come on top: a budget of one block is a column besides the first, and a band of distances."""
    vertical, slash = torch.zeros(1, 96), torch.zeros(1, 96)
    vertical[0, 16], vertical[0, 40], vertical[0, 70] = 0.5, 0.3, 0.2
    slash[0, 48], slash[0, 64], slash[0, 80] = 0.5, 0.3, 0.2
    scores = lines(96, vertical=vertical, slash=slash)
    assert kept(VerticalSlashCdf(0.5)(scores), 5) == [0, 1, 2, 5]  # distances 48 to 63 lie in blocks 1 and 2
    assert kept(VerticalSlashCdf(0.0)(scores), 5) == [0, 5]
    assert kept(VerticalSlashCdf(0.0, min_budget=1)(scores), 5) == [0, 1, 2, 5]
    assert kept(VerticalSlashCdf(0.0, min_budget=B16)(scores), 5) == [0, 1, 2, 5]
    assert kept(VerticalSlashCdf(0.9)(scores), 5) == [0, 1, 2, 4, 5]
    assert kept(VerticalSlashCdf(0.9, max_budget=B16)(scores), 5) == [0, 1, 2, 5]
    assert kept(VerticalSlashCdf(1.0)(scores), 5) == [0, 1, 2, 3, 4, 5]
    # Inside the budget of one block, of 128 tokens each, nothing is left for what they look at.
    assert kept(VerticalSlashCdf(0.9, released=True)(scores), 5) == [0, 5]
    assert kept(VerticalSlashCdf(0.9, released=True, min_budget=2 * B16)(scores), 5) == [0, 1, 2, 5]


def test_released_bins_count_from_the_far_end() -> None:
    """Of 72 distances in blocks of 16, the nearest 8 are the main diagonal, the next 16 the one below it."""
    slash = torch.zeros(3, 72)
    slash[0, 10] = slash[1, 30] = slash[2, 60] = 1.0
    mask = VerticalSlashCdf(0.9, released=True, min_budget=2 * B16)(lines(72, slash=slash))
    assert [kept(mask, 4, head) for head in range(3)] == [[0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 4]]  # 1 is a column
    scores = lines(80, slash=torch.eye(80)[:1], causal=False)
    mask = VerticalSlashCdf(0.9, released=True, min_budget=2 * B16)(scores)
    rows = [kept(mask, row) for row in range(5)]
    assert rows == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4]]


def test_released_budget_is_a_block_per_128_tokens() -> None:
    vertical = torch.full((2, 256), 1 / 256)
    mask = VerticalSlashCdf([126.5 / 256, 127.5 / 256], released=True)(lines(256, vertical=vertical))
    assert (kept(mask, 15, 0), kept(mask, 15, 1)) == ([0, 15], [0, 1, 15])  # 127 tokens, and 128


def test_mass_per_head_and_ties_to_the_lower_line() -> None:
    vertical = torch.full((2, 64), 1 / 64)
    mask = VerticalSlashCdf([0.4, 0.6])(lines(64, vertical=vertical))
    assert (kept(mask, 3, 0), kept(mask, 3, 1)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    mask = VerticalSlashCdf([0.2, 0.4])(lines(64, vertical=vertical))
    assert (kept(mask, 3, 0), kept(mask, 3, 1)) == ([0, 2, 3], [0, 1, 2, 3])  # band 0 crosses the two nearest


# Query-aware heads, and the router.


def head(rows: list[list[float]], forced: list[int] | None = None) -> bs.BlockMass:
    """One head, not causal."""
    values = torch.tensor(rows).view(1, 1, len(rows), -1)
    q, k = torch.zeros(1, 1, len(rows) * B16, 8), torch.zeros(1, 1, values.shape[-1] * B16, 8)
    grid = grid_of(q, k, B16, causal=False)
    keep = torch.zeros_like(values, dtype=torch.bool)
    keep[..., forced or []] = True
    return bs.BlockMass(values, grid, keep)


def test_global_top_cdf_shares_one_budget() -> None:
    scores = head([[0.9, 0.06, 0.04], [0.4, 0.35, 0.25]])
    for mass, crossing, expected in (
        (0.5, True, [[0], [0]]),  # .9 of 2, then the .4 that reaches 1.0
        (0.5, False, [[0], []]),
        (0.65, False, [[0], [0]]),  # .9 + .4 is exactly .65 of 2
        (0.9, True, [[0], [0, 1, 2]]),  # a flat row keeps all, a sharp one what it needs
        (1.0, True, [[0, 1, 2], [0, 1, 2]]),
        (1, False, [[0, 1, 2], [0, 1, 2]]),
    ):
        mask = GlobalTopCdf(mass, crossing=crossing)(scores)
        assert [kept(mask, row) for row in range(2)] == expected, (mass, crossing)
    assert kept(GlobalTopCdf(0.1)(head([[0.5, 0.3, 0.2]], forced=[2])), 0) == [0, 2]


def test_router_takes_each_head_its_way() -> None:
    vertical = torch.full((4, 64), 1 / 64)
    scores = attrs.evolve(lines(64, vertical=vertical), divergence=torch.tensor([[0.05, 0.25, 0.5, float("nan")]]))
    everything = scores.grid.visible[0, 0].sum()
    for tau, dense in (
        (0.25, [True, False, False, False]),
        ([0.01, 0.3, 0.6, 0.8], [False, True, True, False]),
        (0.0, [False] * 4),
    ):
        router = RoutedByDivergence(tau, similar=bs.Everything(), otherwise=bs.Band(0))
        assert (router(scores).keep.sum((-1, -2))[0] == everything).tolist() == dense


def test_router_refuses_another_grid() -> None:
    scores = lines(64, vertical=torch.full((2, 64), 1 / 64))
    for rule in (bs.SharedByGroup(VerticalSlashCdf(0.5)), bs.Refined(VerticalSlashCdf(0.5), 2)):
        with pytest.raises(ValueError, match="Put 'Refined' and 'SharedByGroup' around it"):
            RoutedByDivergence(0.1, rule, VerticalSlashCdf(0.5))(scores)


@pytest.mark.parametrize("as_released", [False, True])
def test_the_last_chunk_chooses_as_the_whole_prompt(as_released: bool) -> None:
    """In other than query-aware heads, when it holds the last queries; blocks lie on the whole prompt's grid."""
    q, k, v = make_qkv(B=2, N=203, D=16)
    pipeline = flex_prefill(
        0.7, 0.0, block=B16, min_budget=1, as_released=as_released, executor=bs.ReferenceExecutor()
    )
    whole, last = pipeline.trace(q, k, v), pipeline.trace(q[:, :, 70:], k, v)
    assert torch.equal(kept_pairs(last.mask), kept_pairs(whole.mask)[:, :, 70:])

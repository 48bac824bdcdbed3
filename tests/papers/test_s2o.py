"""S2O: index maps, the stop rule and what it reports, against slow loops. The authors have released no code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from tests.specs import asked, grid_of, kept_pairs, not_none
from torch import Tensor

import blocksparse as bs
from blocksparse.check.per_head import HeadValues
from blocksparse.execute.gather import GatherExecutor
from blocksparse.order.content_orders import GlobalIndexMap
from blocksparse.presets.text import s2o
from blocksparse.score.pooled import PrefixOrderScorer
from blocksparse.testing import assert_within_budget, make_qkv

AnyTrace = bs.Trace[Any, Any, Any]
SIZES: dict[str, Any] = {"B": 2, "Hq": 4, "Hkv": 2, "D": 16}
CHUNKS = [(200, 200), (200, 136), (200, 100), (193, 37), (200, 1), (65, 64), (64, 64), (63, 63), (1, 1)]


def key_map(permuter: GlobalIndexMap, q: Tensor, k: Tensor) -> Tensor:
    index = not_none(permuter(q, k, bs.AttentionSpec(scale=0.25)).k_index)
    assert index.dtype == torch.int32
    return index


def slow_map(
    q: Tensor, k: Tensor, S: int, prefix: int | None, near: int = 0
) -> Iterator[tuple[int, int, int, list[int]]]:
    """Algorithm 1, one head and segment at a time: the keys that a map must list, without its empty slots.

    Between own and sorted keys stand the `near` ones before the segment, the last one first.
    """
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    offset = N - M
    for b in range(B):
        for h in range(Hq):
            for g, n in enumerate(range(offset // S, (N - 1) // S + 1)):
                present = [t - offset for t in range(n * S, min((n + 1) * S, N)) if t >= offset]
                mean = q[b, h, present].double().mean(0)
                score = k[b, h // (Hq // Hkv)].double() @ mean
                close = range(n * S - 1, max(0, n * S - near) - 1, -1)
                ranked = sorted(range(n * S - len(close)), key=lambda t: (-float(score[t]), t))
                yield b, h, g, [*range(n * S, min((n + 1) * S, N)), *close, *ranked[:prefix]]


@pytest.mark.parametrize("near", [0, 20, 1000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 32, 50))])
@pytest.mark.parametrize(("N", "M"), CHUNKS)
def test_key_map(N: int, M: int, near: int) -> None:
    """Own keys in order, the `near` ones before them, nearest first, then some others by falling score.

    Each part has slots of its own, so that no block mixes them. In a coarse map none of the others is further from
    its place than a step of scores; beyond the range of every eighth key's, scores count as equal.
    """
    S = 32
    q, k, _ = make_qkv(**SIZES, N=N, M=M)
    longest = (N - 1) // S * S
    together = min(near, longest)
    for prefix in (None, 1, 20, 64, 1000):
        options: dict[str, Any] = {"prefix": prefix, "near": near}
        index, coarse = (key_map(GlobalIndexMap(S, **options, coarse=x), q, k) for x in (False, True))
        rest = longest - together
        slots = S + together + (rest if prefix is None else min(prefix, rest))
        assert index.shape[2:] == ((N - 1) // S - (N - M) // S + 1, slots)
        assert torch.equal(coarse >= 0, index >= 0)
        assert torch.equal(coarse[..., : S + together], index[..., : S + together])
        for b, h, g, want in slow_map(q, k, S, prefix, near):
            start = ((N - M) // S + g) * S
            own, others = min(S, N - start), max(start - near, 0)
            its, ordered = index[b, h, g], coarse[b, h, g, S + together :]
            assert its[its >= 0].tolist() == want
            assert bool((its[own:S] == -1).all())
            assert its[S : S + together].tolist() == [max(start - 1 - i, -1) for i in range(together)]
            held = len(want) - own - min(near, start)
            assert bool((its[S + together + held :] == -1).all())
            assert len(set(ordered[:held].tolist())) == held
            assert bool((ordered[:held] < others).all())
            if others >= 8:
                present = slice(max(0, start - (N - M)), start + S - (N - M))
                score = k[b, h // 2, :others].double() @ q[b, h, present].double().mean(0)
                low, high = score[7::8].aminmax()
                best = score.sort(descending=True).values[:held]
                apart = score[ordered[:held].long()].clamp(low, high) - best.clamp(low, high)
                assert bool((apart.abs() <= (high - low) / 256 + 1e-5).all())


@pytest.mark.parametrize("prefix", [None, 10])
def test_ties_go_to_the_lower_position(prefix: int | None) -> None:
    """All keys alike, or alike but for the sign of zero, or not numbers: the order is that of positions."""
    q, k = torch.ones(1, 1, 64, 4), torch.ones(1, 1, 64, 4)
    zeros = torch.zeros(1, 1, 64, 1)
    zeros[:, :, ::2] = -0.0
    for queries, keys in ((q, k), (q[..., :1], zeros), (q, k.fill_(float("nan"))), (float("nan") * q, k)):
        index = key_map(GlobalIndexMap(16, prefix=prefix), queries, keys)
        assert index[0, 0, 3, 16:].tolist() == list(range(48 if prefix is None else prefix))


def test_queries_are_ordered_inside_segments() -> None:
    """By falling product with the mean key of segment 0, wherever the chunk starts; ties keep their order."""
    S = 32
    for N, M in CHUNKS:
        q, k, _ = make_qkv(**SIZES, N=N, M=M)
        q[:, :, -3:] = q[:, :, -1:]
        for guide in (None, 5):
            index = not_none(GlobalIndexMap(S, guide=guide)(q, k, bs.AttentionSpec(scale=1.0)).q_index)
            assert index.dtype == torch.int32
            coarse = not_none(
                GlobalIndexMap(S, guide=guide, coarse=True)(q, k, bs.AttentionSpec(scale=1.0)).q_index
            )
            assert bool((coarse.sort(-1).values == torch.arange(M)).all())
            direction = k[:, :, : guide or S].double().mean(2)
            for b in range(2):
                for h in range(4):
                    score = q[b, h].double() @ direction[b, h // 2]
                    want = sorted(range(M), key=lambda i: ((N - M + i) // S, -round(float(score[i]), 9), i))
                    assert index[b, h].tolist() == want
                    near = score[coarse[b, h].long()] - score[want]
                    assert bool((near.abs() <= 1e-4).all())
    assert GlobalIndexMap(S, order_queries=False)(q, k, bs.AttentionSpec(scale=1.0)).q_index is None


@pytest.mark.parametrize("group", [1, 3, 4])
def test_one_map_per_kv_head(group: int) -> None:
    """It comes from the mean query of the group, which is the same map where a group has one head."""
    q, k, _ = make_qkv(B=2, Hq=2 * group, Hkv=2, N=130, M=90, D=16)
    shared = key_map(GlobalIndexMap(32, per_query_head=False), q, k)
    mean = q.double().unflatten(1, (2, group)).mean(2)
    assert torch.equal(shared, key_map(GlobalIndexMap(32), mean, k.double()))
    assert key_map(GlobalIndexMap(32), q, k).shape[1] == 2 * group


@pytest.mark.parametrize("band", [0, 24, 64])
@pytest.mark.parametrize(("prefix", "coarse"), [(None, False), (40, False), (40, True)])
@pytest.mark.parametrize("start", [32, 64, 96, 128, 160])
def test_chunks_of_whole_segments_choose_alike(start: int, prefix: int | None, coarse: bool, band: int) -> None:
    """A prompt read in whole segments gets the maps, stops and outputs of the whole prompt, bit for bit."""
    q, k, v = make_qkv(**SIZES, N=187)
    pipeline = s2o(0.05, S=32, block=16, prefix=prefix, coarse=coarse, band=band)
    whole = pipeline.trace(q, k, v)
    first = pipeline.trace(q[:, :, :start], k[:, :, :start], v[:, :, :start])
    second = pipeline.trace(q[:, :, start:], k, v)
    rows = start // 16
    assert first.permutation.k_index is not None
    assert whole.permutation.k_index is not None
    slots, cols = first.permutation.k_index.shape[-1], first.mask.grid.cols
    assert torch.equal(first.permutation.k_index, whole.permutation.k_index[:, :, : start // 32, :slots])
    assert torch.equal(not_none(second.permutation.k_index), whole.permutation.k_index[:, :, start // 32 :])
    assert torch.equal(first.visited.keep, whole.visited.keep[:, :, :rows, :cols])
    assert torch.equal(second.visited.keep, whole.visited.keep[:, :, rows:])
    assert torch.equal(first.output.out, whole.output.out[:, :, :start])
    assert torch.equal(second.output.out, whole.output.out[:, :, start:])


def slow_stop(trace: AnyTrace, executor: GatherExecutor) -> tuple[Tensor, float]:
    """Algorithm 3 for one row of blocks at a time, in float64: blocks visited, and how clear it was."""
    q, k, mask, tau = trace.q.double(), trace.k.double(), trace.mask, executor.tau
    visited, clearest = torch.zeros_like(mask.keep), float("inf")
    for row in range(mask.grid.rows):
        slots, query = mask.slots(row), mask.queries(row)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                limit = float(tau.values[h]) if isinstance(tau, HeadValues) else tau
                position = query[b, h] + trace.k.shape[2] - trace.q.shape[2]
                mass = torch.zeros(len(position), dtype=torch.float64)
                low = 0
                kept = mask.keep[b, h, row].nonzero().flatten().tolist()
                for block in sorted(kept, key=lambda block: int(mask.rank[b, h, row, block])):
                    token = slots[b, h, block]
                    token = token[token >= 0].long()
                    logits = (
                        q[b, h, query[b, h]] @ k[b, h // (q.shape[1] // k.shape[1]), token].T * trace.spec.scale
                    )
                    # One frame for all: these inputs are far from overflow in float64.
                    gain = logits.exp().masked_fill(token > position[:, None], 0.0).sum(-1)
                    if mask.rank[b, h, row, block] < 0 or limit == 0:
                        visited[b, h, row, block] = True
                        mass += gain
                        continue
                    share = gain / mass
                    value = share.mean() if executor.reduction == "mean" else share.max()
                    clearest = min(clearest, abs(float(value) / limit - 1))
                    low = low + 1 if value < limit else 0
                    if low < executor.patience or executor.commit:
                        visited[b, h, row, block] = True
                        mass += gain
                    if low == executor.patience:
                        break
    return visited, clearest


RULES = [
    GatherExecutor(0.05),
    GatherExecutor(0.2, commit=False),
    GatherExecutor(0.1, reduction="mean"),
    GatherExecutor(0.3, patience=2),
    GatherExecutor(0.3, patience=2, commit=False, reduction="mean"),
    GatherExecutor([0.0, 0.02, 0.2, float("inf")]),
]


@pytest.mark.parametrize("executor", RULES, ids=repr)
def test_stop_rule(executor: GatherExecutor) -> None:
    """A band opens a row, and the rule is asked from the next block on."""
    stopped = 0
    for N, M, band in ((200, 200, 0), (193, 117, 0), (193, 117, 40)):
        q, k, v = make_qkv(**SIZES, N=N, M=M)
        trace = s2o(S=64, block=16, band=band, executor=executor).trace(q, k, v)
        want, clearest = slow_stop(trace, executor)
        assert clearest > 1e-5  # nothing hangs on rounding
        assert torch.equal(trace.visited.keep, want)
        stopped += int((trace.mask.keep & ~want).any(-1).sum())
        assert_replayed(trace)
    assert stopped > 20


def nearby(N: int, M: int, tokens: int, *, causal: bool = True) -> Tensor:
    """The pairs that a band of so many tokens means, `[M, N]`."""
    apart = torch.arange(N - M if causal else 0, N if causal else M)[:, None] - torch.arange(N)
    return (apart <= tokens) & (apart >= (0 if causal else -tokens))


NEVER_ON: tuple[GatherExecutor, ...] = (  # these stop at the first block that may end a row
    GatherExecutor(float("inf")),
    GatherExecutor(float("inf"), commit=False),
)


@pytest.mark.parametrize("band", [1, 16, 20, 48, 1000])
@pytest.mark.parametrize(("N", "M"), CHUNKS)
def test_a_band_is_visited_before_a_row_may_stop(N: int, M: int, band: int) -> None:
    """Every query attends to all keys up to `band` before it, and to its own, wherever its row stops."""
    q, k, v = make_qkv(**SIZES, N=N, M=M, dtype=torch.float64)
    inside = nearby(N, M, band)
    # Each executor with each order, in turn: with every band, and with a prompt or a chunk.
    exact = {"per_query_head": False, "prefix": 5, "coarse": False}
    every: list[dict[str, Any]] = [{}, {"order_queries": False}, exact]
    for turn, options in enumerate(every):
        executor = NEVER_ON[(turn + CHUNKS.index((N, M))) % 2]
        trace = s2o(S=32, block=16, band=band, executor=executor, **options).trace(q, k, v)
        assert bool((kept_pairs(trace.visited) | ~inside).all())
        want = bs.ReferenceExecutor()(q, k, v, trace.visited, asked(trace.visited, trace.spec.scale)).out
        torch.testing.assert_close(trace.output.out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("permuter", [bs.Identity(), bs.SegmentKeySort(64), GlobalIndexMap(32)], ids=repr)
def test_any_order_may_open_with_a_band(permuter: bs.Permuter[Any], causal: bool) -> None:
    """Also one that leaves these keys where they are, which takes more blocks; and whatever was chosen."""
    if isinstance(permuter, GlobalIndexMap) and not causal:
        return
    q, k, v = make_qkv(**SIZES, N=187, M=150)
    for band in (0, 1, 40):
        selector = bs.Ranked(bs.TopK(1), first=bs.Band(band) | bs.Sink(3))
        trace = bs.Pipeline(permuter, bs.NoScorer(16), selector, NEVER_ON[1]).trace(q, k, v, causal=causal)
        pairs = kept_pairs(trace.visited)
        inside = nearby(187, 150, band, causal=causal)
        assert bool((pairs | ~inside).all())
        assert bool(pairs[..., :3].all())
        assert_replayed(trace)


def test_a_band_takes_few_blocks() -> None:
    """Only blocks of own and near keys are opened, and with queries in place only those that the row needs."""
    q, k, v = make_qkv(**SIZES, N=256)
    for block, band, order_queries in ((16, 32, True), (16, 32, False), (32, 32, False), (16, 64, False)):
        pipeline = s2o(S=64, block=block, band=band, order_queries=order_queries, executor=NEVER_ON[1])
        visited = pipeline.trace(q, k, v).visited.keep
        rows = 64 // block
        assert not bool(visited[..., rows + band // block :].any())
        if not order_queries:
            row = torch.arange(256 // block)
            within = row % rows  # whole blocks before the row in its segment
            needed = (band // block - within).clamp_min(0).minimum(row - within)
            assert torch.equal(visited.sum(-1), (1 + within + needed).expand(2, 4, -1))


def assert_replayed(trace: AnyTrace) -> None:
    q, k, v = (x.double() for x in (trace.q, trace.k, trace.v))
    want = bs.ReferenceExecutor()(q, k, v, trace.visited, asked(trace.visited, trace.spec.scale))
    same = bs.ReferenceExecutor()(trace.q, trace.k, trace.v, trace.visited, asked(trace.visited, trace.spec.scale))
    assert_within_budget(trace.output.out, want.out, same.out)
    torch.testing.assert_close(trace.output.lse, same.lse, rtol=1e-5, atol=1e-5)


def reached(executor: GatherExecutor, *ranks: int, keys: list[float]) -> list[int]:
    """The blocks that one query visits, which has seen every key: of 16 equal keys each, with these ranks."""
    k = torch.tensor(keys).repeat_interleave(16).view(1, 1, -1, 1)
    q, v = torch.ones(1, 1, 1, 1), torch.ones_like(k)
    keep = torch.ones(1, 1, 1, len(ranks), dtype=torch.bool)
    mask = bs.RankedBlockMask(keep, grid_of(q, k, 16), torch.tensor(ranks, dtype=torch.int32).view(1, 1, 1, -1))
    output = executor(q, k, v, mask, asked(mask, 1.0))
    columns: list[int] = not_none(output.visited).keep[0, 0, 0].nonzero().flatten().tolist()
    return columns


def test_known_answers() -> None:
    """Four blocks of equal keys, the last of which opens the row."""
    flat = [0.0, 0.0, 0.0, 0.0]
    order = (0, 1, 2, -1)
    assert reached(GatherExecutor(0.99), *order, keys=flat) == [0, 1, 3]  # gains 1, then 1/2
    assert reached(GatherExecutor(0.4), *order, keys=flat) == [0, 1, 2, 3]  # 1/3
    assert reached(GatherExecutor(0.99, commit=False), *order, keys=flat) == [0, 3]
    assert reached(GatherExecutor(0.99, patience=2), *order, keys=flat) == [0, 1, 2, 3]
    assert reached(GatherExecutor(1.01), *order, keys=flat) == [0, 3]
    assert reached(GatherExecutor(1.01), 2, 1, 0, -1, keys=flat) == [2, 3]  # by rank, not by column
    assert reached(GatherExecutor(1e9), -1, -3, -2, -4, keys=flat) == [0, 1, 2, 3]  # these are never asked
    # A low block between high ones: one stops there, patience does not, and starts to count again.
    hill = [-9.0, 0.0, -9.0, 0.0]
    assert reached(GatherExecutor(0.1), *order, keys=hill) == [0, 3]
    assert reached(GatherExecutor(0.1, patience=2), *order, keys=hill) == [0, 1, 2, 3]


def test_a_rising_maximum_is_no_reason_to_stop() -> None:
    """Read literally, the printed rule compares sums of two maxima, and stops at the block that matters most."""
    assert reached(GatherExecutor(0.01), 0, 1, 2, -1, keys=[20.0, 40.0, 0.0, 0.0]) == [0, 1, 2, 3]
    assert reached(GatherExecutor(0.01), 0, 1, 2, -1, keys=[20.0, 0.0, 40.0, 0.0]) == [0, 1, 3]


def test_a_constant_on_all_logits_changes_nothing() -> None:
    """A further dimension adds the same number to every logit of a query."""
    q, k, v = make_qkv(**SIZES, N=200)
    pipeline = s2o(0.1, S=64, block=16)
    plain = pipeline.trace(q, k, v, scale=0.25)
    assert int((plain.mask.keep & ~plain.visited.keep).sum()) > 0
    for constant in (-64.0, 64.0, 800.0):
        wide_q = torch.cat((q, torch.full_like(q[..., :1], 4 * constant)), dim=-1)
        wide_k = torch.cat((k, torch.ones_like(k[..., :1])), dim=-1)
        output = pipeline.executor(wide_q, wide_k, v, plain.mask, asked(plain.mask, 0.25))
        assert torch.equal(not_none(output.visited).keep, plain.visited.keep)
        torch.testing.assert_close(output.out, plain.output.out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("per_query_head", [True, False])
@pytest.mark.parametrize(("N", "M"), [(187, 187), (187, 100), (160, 64)])
def test_prefix_order_scores(N: int, M: int, per_query_head: bool) -> None:
    """Mass of a block: what a segment's mean query gives its keys, among the keys before the segment."""
    S = 64
    q, k, v = make_qkv(**SIZES, N=N, M=M, dtype=torch.float64)
    permuter = GlobalIndexMap(S, per_query_head=per_query_head)
    pipeline = bs.Pipeline(permuter, PrefixOrderScorer(16, k_block=32), bs.Everything(), bs.ReferenceExecutor())
    trace = pipeline.trace(q, k, v)
    grid, scores = trace.mask.grid, trace.scores
    for row in range(grid.rows):
        n = ((N - M) // 16 + row) * 16 // S
        present = slice(max(0, n * S - (N - M)), (n + 1) * S - (N - M))
        logits = torch.einsum("bhd,bhnd->bhn", q[:, :, present].mean(2), k.repeat_interleave(2, 1)) * 0.25
        weight = logits[..., : n * S].softmax(-1)
        slots = trace.mask.slots(row)  # [B, Hq, cols, 32]
        for column in range(grid.cols):
            token = slots[:, :, column].long()
            there = (token >= 0) & (token < n * S)
            want = weight.gather(-1, token.where(there, 0)).where(there, 0.0).sum(-1) if n else torch.zeros(2, 4)
            torch.testing.assert_close(scores.values[:, :, row, column], want.double())
            own = (token >= n * S).any(-1) & grid.visible[:, :, row, column]
            assert torch.equal(not_none(scores.forced)[:, :, row, column].expand_as(own), own)


def test_prefix_order_without_groups() -> None:
    """Each row of blocks is a group then; causal or not, the mass of a row is 1."""
    q, k, v = make_qkv(**SIZES, N=150, M=100)
    for permuter in (bs.Identity(), bs.SegmentKeySort(32, last_q=16)):
        for causal in (True, False):
            pipeline = bs.Pipeline(permuter, PrefixOrderScorer(16), bs.TopCdf(0.8), bs.ReferenceExecutor())
            trace = pipeline.trace(q, k, v, causal=causal)
            torch.testing.assert_close(trace.scores.values.sum(-1), torch.ones(2, 4, trace.mask.grid.rows))
            assert trace.scores.forced is None
            assert float(trace.density().mean()) < 0.9
            assert bool((trace.scores.values.masked_fill(trace.mask.grid.visible, 0.0) == 0).all())


def test_refused() -> None:
    pipeline = s2o()
    with pytest.raises(TypeError, match=r"RankedBlockMask, and Union gives .*first=b\)` makes one of `a \| b`"):
        attrs.evolve(pipeline, selector=pipeline.selector | bs.Band(64))  # type: ignore[arg-type]
    q, k, v = make_qkv(N=64, D=16)
    with pytest.raises(ValueError, match="whole number of query blocks"):
        bs.Pipeline(GlobalIndexMap(24), bs.NoScorer(16), bs.Ranked(bs.Everything()), GatherExecutor())(q, k, v)


@pytest.mark.parametrize("tau", [1e308, [1e308] * 4], ids=["one", "per head"])
def test_a_tau_beyond_fp32_stops_at_once(tau: Any) -> None:
    q, k, v = make_qkv(N=200, Hq=4, Hkv=2, D=16)
    pipeline = bs.s2o(tau, S=32, block=16)
    assert torch.equal(pipeline(q, k, v), bs.s2o(float("inf"), S=32, block=16)(q, k, v))

"""The laws, each over every legal composition of the stages there are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from blocksparse.testing import assert_within_budget, every_preset, make_qkv, masked_attention
from tests import stages

Front = tuple[bs.Permuter[Any], bs.Scorer[Any, Any]]
Composition = tuple[bs.Permuter[Any], bs.Scorer[Any, Any], bs.Selector[Any, Any]]
# The fast loop takes one scorer with everything else; the rest of the product is marked slow.
COMPOSITIONS = [
    pytest.param(c, id=stages.name(*c), marks=[] if c[1] is stages.SCORERS[0] else [pytest.mark.slow])
    for c in stages.compositions()
]
FRONTS = [pytest.param((p, s), id=stages.name(p, s)) for p in stages.PERMUTERS for s in stages.SCORERS]
EXECUTORS = [pytest.param(e, id=stages.name(e)) for e in stages.EXECUTORS if not isinstance(e, bs.AutoExecutor)]
SIZES: dict[str, Any] = {"B": 2, "Hq": 4, "Hkv": 2, "N": 129, "D": 16}
SMALL: dict[str, Any] = {"B": 1, "Hq": 2, "Hkv": 1, "N": 83, "D": 16}  # where kernels are interpreted

each_composition = pytest.mark.parametrize("composition", COMPOSITIONS)
each_executor = pytest.mark.parametrize("executor", EXECUTORS)


def pairs_of(mask: bs.BlockMask) -> Tensor:
    """The meaning of a mask, `[B, Hq, M, N]` bool, queries in original order."""
    grid = mask.grid
    pairs = torch.zeros(
        mask.keep.shape[0], grid.q_heads, grid.q_len, grid.k_len, dtype=torch.bool, device=mask.keep.device
    )
    for row in range(grid.rows):
        index = mask.queries(row).unsqueeze(-1).expand(-1, -1, -1, grid.k_len)
        pairs.scatter_(2, index, mask.pairs(row))
    return pairs


def runs(executor: bs.Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> bool:
    return not executor.unsupported(q, k, v, mask)


def test_every_stage_has_an_example() -> None:
    exported = [x for x in vars(bs).values() if inspect.isclass(x) and not inspect.isabstract(x)]
    for role, examples in (
        (bs.Permuter, stages.PERMUTERS),
        (bs.Scorer, stages.SCORERS),
        (bs.Selector, (*stages.SELECTORS, *stages.REFINED)),
        (bs.Executor, stages.EXECUTORS),
    ):
        missing = {x for x in exported if issubclass(x, role)} - {type(x) for x in examples}
        assert not missing, f"add an example of {missing} to tests/stages.py"
    presets = {n for n, x in vars(bs).items() if inspect.isfunction(x)}
    assert presets == set(every_preset), "add the preset to blocksparse.testing.every_preset"


@pytest.mark.parametrize("causal", [True, False])
@each_composition
def test_executor_is_the_meaning(composition: Composition, causal: bool) -> None:
    """The reference equals one masked softmax over the pairs that permutation and mask mean."""
    q, k, v = make_qkv(**SIZES, M=100, dtype=torch.float64)
    trace = bs.Pipeline(*composition, bs.ReferenceExecutor()).trace(q, k, v, causal=causal)
    want = masked_attention(q, k, v, pairs_of(trace.mask), trace.scale)
    torch.testing.assert_close(trace.output.out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@each_executor
@each_composition
def test_every_executor_agrees(
    composition: Composition, executor: bs.Executor[Any, Any], causal: bool, device: str
) -> None:
    q, k, v = make_qkv(**SMALL, M=60, device=device)
    front = bs.Pipeline(*composition, bs.ReferenceExecutor()).trace(q, k, v, causal=causal)
    if not runs(executor, q, k, v, front.mask):
        pytest.skip(f"unsupported: {executor.unsupported(q, k, v, front.mask)}")
    got = executor(q, k, v, front.permutation, front.mask, scale=front.scale)
    q64, k64, v64 = q.double(), k.double(), v.double()
    want = bs.ReferenceExecutor()(q64, k64, v64, front.permutation, front.mask, scale=front.scale)
    yardstick = masked_attention(q, k, v, pairs_of(front.mask), front.scale)
    assert_within_budget(got.out, want.out, yardstick)
    if got.lse is not None:
        assert want.lse is not None
        torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=1e-5)


@each_executor
@pytest.mark.parametrize("front", FRONTS)
def test_dense_limit(front: Front, executor: bs.Executor[Any, Any], device: str) -> None:
    """Keeping everything reachable gives full attention."""
    q, k, v = make_qkv(**SMALL, device=device)
    got = bs.Pipeline(front[0], front[1], bs.Everything(), executor)(q, k, v)
    want, yardstick = (
        scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True)
        for dtype in (torch.float64, q.dtype)
    )
    assert_within_budget(got, want, yardstick)


@pytest.mark.parametrize("selector", [bs.TopCdf(1.0), bs.TopCdf(1), bs.TopK(share=1.0), bs.TopK(10**6)])
@pytest.mark.parametrize("front", FRONTS)
def test_selectors_reach_the_dense_limit(front: Front, selector: bs.Selector[Any, Any]) -> None:
    q, k, v = make_qkv(**SIZES)
    trace = bs.Pipeline(front[0], front[1], selector, bs.ReferenceExecutor()).trace(q, k, v)
    assert torch.equal(trace.mask.keep, trace.mask.grid.reachable.expand_as(trace.mask.keep))


@each_executor
@each_composition
def test_causality_by_perturbation(composition: Composition, executor: bs.Executor[Any, Any], device: str) -> None:
    """With the choice of blocks held, changing every token from `t` on leaves earlier rows bit-identical."""
    q, k, v = make_qkv(**SMALL, device=device)
    front = bs.Pipeline(*composition, bs.ReferenceExecutor()).trace(q, k, v)
    if not runs(executor, q, k, v, front.mask):
        pytest.skip(f"unsupported: {executor.unsupported(q, k, v, front.mask)}")
    t = 53
    noise = make_qkv(**SMALL, device=device, seed=1)
    q2, k2, v2 = (torch.cat((x[:, :, :t], y[:, :, t:]), dim=2) for x, y in zip((q, k, v), noise, strict=True))
    before = executor(q, k, v, front.permutation, front.mask, scale=front.scale).out
    after = executor(q2, k2, v2, front.permutation, front.mask, scale=front.scale).out
    assert torch.equal(before[:, :, :t], after[:, :, :t])
    assert not torch.equal(before[:, :, t:], after[:, :, t:])


@pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
@pytest.mark.parametrize("selector", [*stages.SELECTORS, *stages.REFINED], ids=stages.name)
def test_selection_sees_no_future_block(scorer: bs.Scorer[Any, Any], selector: bs.Selector[Any, Any]) -> None:
    """In original order the choice for a row of blocks depends on nothing after it."""
    q, k, v = make_qkv(**SIZES)
    noise = make_qkv(**SIZES, seed=1)
    t = 64  # a multiple of every block
    q2, k2, v2 = (torch.cat((x[:, :, :t], y[:, :, t:]), dim=2) for x, y in zip((q, k, v), noise, strict=True))
    pipeline = bs.Pipeline(bs.Identity(), scorer, selector, bs.ReferenceExecutor())
    before, after = pipeline.trace(q, k, v), pipeline.trace(q2, k2, v2)
    rows = t // before.mask.grid.q_block
    assert torch.equal(before.mask.keep[:, :, :rows], after.mask.keep[:, :, :rows])
    assert torch.equal(before.output.out[:, :, :t], after.output.out[:, :, :t])


@pytest.mark.parametrize("start", [1, 32, 40, 63, 64, 82])
@each_executor
@pytest.mark.parametrize("permuter", stages.PERMUTERS[:3], ids=stages.name)
def test_chunked_equals_unchunked(
    permuter: bs.Permuter[Any], executor: bs.Executor[Any, Any], start: int, device: str
) -> None:
    """Rows stand on the grid of the whole prompt, so a chunk takes its rows of the mask, wherever it starts."""
    q, k, v = make_qkv(**SMALL, device=device)
    whole = bs.Pipeline(permuter, bs.MeanPoolScorer(32), bs.TopCdf(0.5), bs.ReferenceExecutor()).trace(q, k, v)
    chunk = q[:, :, start:]
    grid = bs.Grid.of(chunk, k, whole.permutation, q_block=32, k_block=32, causal=True)
    mask = bs.BlockMask(whole.mask.keep[:, :, start // 32 :], grid)
    got = executor(chunk, k, v, whole.permutation, mask, scale=whole.scale).out
    torch.testing.assert_close(got, whole.output.out[:, :, start:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [1, 16, 40, 63, 64, 100, 128])
@pytest.mark.parametrize("selector", [bs.Band(20), bs.Sink(5), bs.FirstToken(), bs.Everything()], ids=stages.name)
def test_geometry_does_not_depend_on_chunks(selector: bs.Selector[Any, Any], start: int) -> None:
    q, k, v = make_qkv(**SIZES)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), selector, bs.ReferenceExecutor())
    whole, chunk = pipeline.trace(q, k, v), pipeline.trace(q[:, :, start:], k, v)
    later = whole.mask.keep[:, :, start // 16 + (start % 16 > 0) :]
    assert torch.equal(chunk.mask.keep[:, :, chunk.mask.grid.rows - later.shape[2] :], later)
    torch.testing.assert_close(chunk.output.out[:, :, 16:], whole.output.out[:, :, start + 16 :])


@pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
@pytest.mark.parametrize("selector", stages.SELECTORS, ids=stages.name)
def test_aligned_chunks_choose_alike(scorer: bs.Scorer[Any, Any], selector: bs.Selector[Any, Any]) -> None:
    """Chunked at a block boundary, a prompt gets the very same mask in original order."""
    q, k, v = make_qkv(**SIZES)
    pipeline = bs.Pipeline(bs.Identity(), scorer, selector, bs.ReferenceExecutor())
    whole = pipeline.trace(q, k, v)
    first = pipeline.trace(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    second = pipeline.trace(q[:, :, 64:], k, v)
    rows = 64 // whole.mask.grid.q_block
    assert torch.equal(first.mask.keep, whole.mask.keep[:, :, :rows, :rows])
    assert torch.equal(second.mask.keep, whole.mask.keep[:, :, rows:])


@each_composition
def test_no_causal_row_is_empty(composition: Composition) -> None:
    """Every query keeps at least its own key, also where all scores are equal."""
    for gain in (1.0, 0.0):
        q, k, v = (gain * x for x in make_qkv(**SIZES, M=100))
        trace = bs.Pipeline(*composition, bs.ReferenceExecutor()).trace(q, k, v)
        grid, pairs = trace.mask.grid, pairs_of(trace.mask)
        own = torch.arange(grid.q_len) + grid.k_len - grid.q_len
        assert bool(pairs[:, :, torch.arange(grid.q_len), own].all())
        assert trace.output.lse is not None
        assert bool(trace.output.lse.isfinite().all())
        assert bool(trace.output.out.isfinite().all())


@each_executor
def test_a_row_with_nothing_kept(executor: bs.Executor[Any, Any], device: str) -> None:
    """gives 0 and -inf, never NaN and never uninitialised memory."""
    q, k, v = make_qkv(**SIZES, device=device)
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), q_block=32, k_block=32, causal=True)
    keep = grid.reachable.expand(2, 4, -1, -1).clone()
    keep[:, :, 2] = False
    keep[:, 0] = False
    got = executor(q, k, v, bs.GlobalPermutation(), bs.BlockMask(keep, grid), scale=0.25)
    assert bool((got.out[:, :, 64:96] == 0).all())
    assert bool((got.out[:, 0] == 0).all())
    assert bool(got.out.isfinite().all())
    if got.lse is not None:
        assert bool((got.lse[:, :, 64:96] == float("-inf")).all())
        assert bool(got.lse[:, 1:, :64].isfinite().all())


@each_composition
def test_batch_entries_do_not_meet(composition: Composition) -> None:
    q, k, v = make_qkv(**SIZES)
    if isinstance(composition[0], stages.Shuffle):
        pytest.skip("draws one order for the whole batch")
    pipeline = bs.Pipeline(*composition, bs.ReferenceExecutor())
    both, alone = pipeline.trace(q, k, v), pipeline.trace(q[1:], k[1:], v[1:])
    assert torch.equal(both.mask.keep[1:], alone.mask.keep)
    torch.testing.assert_close(both.output.out[1:], alone.output.out)


@each_composition
def test_ties_and_repeats_choose_alike(composition: Composition, device: str) -> None:
    """All-equal keys: the lower column wins, twice the same, and the same on CPU and GPU."""
    q, k, v = (torch.ones_like(x) for x in make_qkv(**SIZES))
    pipeline = bs.Pipeline(*composition, bs.ReferenceExecutor())
    first, second = pipeline.trace(q, k, v), pipeline.trace(q, k, v)
    assert torch.equal(first.mask.keep, second.mask.keep)
    if device != "cpu":
        other = pipeline.trace(q.to(device), k.to(device), v.to(device))
        assert torch.equal(first.mask.keep, other.mask.keep.cpu())


@pytest.mark.parametrize("selector", [*stages.SELECTORS, *stages.REFINED], ids=stages.name)
@pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
def test_same_scores_same_mask_on_every_device(
    scorer: bs.Scorer[Any, Any], selector: bs.Selector[Any, Any], device: str
) -> None:
    if device == "cpu":
        pytest.skip("no GPU here")
    q, k, _ = make_qkv(**SIZES)
    here = scorer(q, k, bs.GlobalPermutation(), causal=True, scale=0.25)
    there = scorer(q.to(device), k.to(device), bs.GlobalPermutation(), causal=True, scale=0.25)
    forced = None if here.forced is None else here.forced.to(device)
    moved = type(here)(here.values.to(device), there.grid, forced)
    assert torch.equal(selector(here).keep, selector(moved).keep.cpu())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@each_composition
def test_bad_numbers_never_hang_or_crash(composition: Composition, value: float) -> None:
    q, k, v = make_qkv(**SIZES)
    q[:, :, 70, 3] = value
    k[:, :, 50, 2] = value
    v[:, :, 20, 1] = value
    trace = bs.Pipeline(*composition, bs.ReferenceExecutor()).trace(q, k, v)
    assert trace.output.out.shape == q.shape
    assert bool((trace.mask.keep & ~trace.mask.grid.reachable).sum() == 0)


@pytest.mark.parametrize("N", [1, 63, 65, 127, 129, 200, 1000])
@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
def test_presets_at_awkward_lengths(preset: Any, N: int) -> None:
    for M in {1, N // 2 + 1, N}:
        q, k, v = make_qkv(N=N, M=M, Hq=7, Hkv=1, D=80)
        trace = preset(executor=bs.ReferenceExecutor()).trace(q, k, v)
        dense = masked_attention(q, k, v, torch.ones(M, N, dtype=torch.bool).tril(N - M), trace.scale)
        assert bool(trace.output.out.isfinite().all())
        torch.testing.assert_close(
            trace.error(),
            ((trace.output.out - dense).abs().sum((-1, -2)) / dense.abs().sum((-1, -2))).double(),
            rtol=1e-3,
            atol=1e-5,
        )
        mass = trace.covered_mass()
        assert bool(((mass > 0.5) & (mass < 1 + 1e-6)).all())


@each_composition
def test_padding_and_tail_never_change_a_real_block(composition: Composition) -> None:
    """In original order a longer prompt gives earlier rows the same scores, wherever the shorter one ended."""
    permuter, scorer, _ = composition
    if not isinstance(permuter, bs.Identity) or getattr(scorer, "padded_tail", False):
        pytest.skip("another order, or the released code's tail")
    q, k, _ = make_qkv(**SIZES)
    long = scorer(q, k, bs.GlobalPermutation(), causal=True, scale=0.25)
    for N in (64, 65, 95, 96, 97):
        short = scorer(q[:, :, :N], k[:, :, :N], bs.GlobalPermutation(), causal=True, scale=0.25)
        rows = N // short.grid.q_block
        torch.testing.assert_close(short.values[:, :, :rows, :rows], long.values[:, :, :rows, :rows])

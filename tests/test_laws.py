"""The laws, each over every legal composition of the stages there are.

A test takes one permuter with one scorer and walks through every selector that fits them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from blocksparse.testing import assert_within_budget, every_preset, make_qkv, masked_attention, video_presets
from blocksparse.testing.inputs import shuffled
from tests import stages
from tests.cases import each, each_of_group, grouped
from tests.machine import needs_flex
from tests.specs import grid_of, kept_pairs, not_none

Front = tuple[bs.Permuter[Any], bs.Scorer[Any, Any]]


@attrs.frozen(slots=False, eq=False)
class Choice:
    """What the stages before an executor made of an input, and, if asked for, what the reference makes of that."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: bs.AttentionSpec
    permutation: Any
    scores: Any
    mask: Any

    @cached_property
    def output(self) -> bs.AttentionOutput:
        return bs.ReferenceExecutor()(self.q, self.k, self.v, self.mask, self.spec)


def is_core(front: Front) -> bool:
    """Every scorer in place, and each kind of order once: the fast loop, and every selector."""
    return front[0] is stages.PERMUTERS[0] or stages.is_first(*front)


# A test for each scorer behind the core permuters, and one behind the others.
FRONTS = grouped(
    (((front,), stages.name(*front)) for front in stages.fronts()),
    group=lambda front: stages.name(front[1]),
    is_slow=lambda front: not is_core(front),
)
# One takes another of these, two need kernels from elsewhere, three approximate: they have tests of their own.
ELSEWHERE = (
    bs.AutoExecutor,
    bs.CudnnExecutor,
    bs.FlashAttention4Executor,
    bs.Int8Executor,
    bs.SkipSoftmaxExecutor,
    bs.MeanCorrectionExecutor,
)


def in_fast_loop(executor: bs.Executor[Any, Any]) -> bool:
    """One compiles for each length, which takes a CPU eight seconds."""
    return torch.cuda.is_available() or not isinstance(executor, bs.FlexExecutor)


EXECUTORS = [
    pytest.param(e, id=stages.name(e), marks=[] if in_fast_loop(e) else [pytest.mark.slow, needs_flex])
    for e in stages.EXECUTORS
    if not isinstance(e, ELSEWHERE)
]


def is_enough(front: Front, executor: bs.Executor[Any, Any]) -> bool:
    """Executors that are interpreted or compiled anew take a second a call: they meet each order once."""
    slow = isinstance(executor, bs.TritonExecutor | bs.FlexExecutor) and not torch.cuda.is_available()
    return not slow or front == next(pair for pair in stages.fronts() if pair[0] is front[0])


# What an executor sees is an order and a mask: it gets each order in blocks of each shape and from each kind of
# selector, and in the fast loop each kind of order once.
PAIRS = [
    ((permuter, scorer), executor)
    for permuter, scorer in stages.fronts()
    for executor in stages.EXECUTORS
    if not isinstance(executor, ELSEWHERE)
    and stages.reads(executor, permuter)
    and stages.cuts_anew(permuter, scorer)
    and is_enough((permuter, scorer), executor)
]


def takes_all(front: Front, executor: bs.Executor[Any, Any]) -> bool:
    """One that compiles for seconds agrees with the others in every order, and keeps the other laws in place."""
    return in_fast_loop(executor) or isinstance(front[0], bs.Identity)


RUNS = grouped(
    (
        ((front, executor), stages.name(*front, executor))
        for front, executor in PAIRS
        if takes_all(front, executor)
    ),
    group=lambda front, executor: stages.name(front[0], executor),
    is_slow=lambda front, executor: not (stages.is_first(*front) and in_fast_loop(executor)),
)
# In both directions where a kind of order is met for the first time, else in turn in one of them.
DIRECTED_RUNS = grouped(
    (
        ((front, executor, causal), f"{stages.name(*front, executor)}-{causal}")
        for i, (front, executor) in enumerate(PAIRS)
        for causal in (True, False)
        if (stages.is_first(*front) and takes_all(front, executor))
        or causal == (i % 2 == 0 or isinstance(front[0], stages.CAUSAL_ONLY))
    ),
    group=lambda front, executor, causal: stages.name(front[0], executor),
    is_slow=lambda front, executor, causal: True,
)
# One token more than whole blocks of 16 and 32, and than segments of 32 and 48; and a part of a second one of 64.
SIZES: dict[str, Any] = {"B": 2, "Hq": 4, "Hkv": 2, "N": 97, "D": 16}
SMALL: dict[str, Any] = {"B": 1, "Hq": 2, "Hkv": 1, "N": 70, "D": 16}  # where kernels are interpreted

each_front = each_of_group("front", groups=FRONTS)
each_executor = pytest.mark.parametrize("executor", EXECUTORS)
each_run = each_of_group("front", "executor", groups=RUNS)
each_scorer = pytest.mark.parametrize("scorer", stages.SCORERS, ids=stages.name)
any_direction = pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])


def first_then(fast: tuple[Any, ...], slow: tuple[Any, ...]) -> list[Any]:
    """A group of values for the fast loop, and one of others."""
    return grouped((((x,), str(x)) for x in fast + slow), lambda x: "some", lambda x: x in slow)


def selectors_for(front: Front, executor: bs.Executor[Any, Any] | None = None) -> list[bs.Selector[Any, Any]]:
    """What a law tries behind a front: every selector that fits it, or three in turn where it is no core front.

    Executors that are interpreted or compiled anew get one, of another kind behind each front.
    """
    fitting = stages.selectors_for(front[1])
    if executor is not None:
        fitting = [s for s in fitting if stages.runs_with(executor, front[0], s)]
    count = 3
    if isinstance(executor, bs.TritonExecutor | bs.FlexExecutor) and not torch.cuda.is_available():
        count = 1
    elif is_core(front):
        return fitting
    turn = count * [front[0] is p and front[1] is s for p, s in stages.fronts()].index(True)
    return [fitting[(turn + i) % len(fitting)] for i in range(min(count, len(fitting)))]


def selectors_in_turn(front: Front) -> list[bs.Selector[Any, Any]]:
    """Every selector behind a core front; a fourth of them behind each other, so that every order meets all."""
    fitting = stages.selectors_for(front[1])
    if is_core(front):
        return fitting
    given = stages.needs(front[1], bs.Scorer, 1)
    alike = [s for p, s in stages.fronts() if p is front[0] and stages.needs(s, bs.Scorer, 1) is given]
    step = min(4, len(alike))
    return fitting[alike.index(front[1]) % step :: step]


def traces(
    front: Front,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selectors: list[bs.Selector[Any, Any]] | None = None,
    *,
    causal: bool = True,
) -> Iterator[Choice]:
    """One pass of the front, then each selector. A failure names it."""
    permuter, scorer = front
    if not causal and isinstance(permuter, stages.CAUSAL_ONLY):
        pytest.skip("refuses what is not causal")
    spec = bs.AttentionSpec(scale=q.shape[-1] ** -0.5, causal=causal)
    permutation = permuter(q, k, spec)
    scores = scorer(q, k, permutation, spec)
    for selector in selectors_for(front) if selectors is None else selectors:
        print(f"selector: {selector!r}")
        yield Choice(q, k, v, spec, permutation, scores, selector(scores))


def runs(executor: bs.Executor[Any, Any], trace: Choice) -> bool:
    """Whether types and values of a trace are what the executor takes."""
    wanted = [stages.needs(executor, bs.Executor, place) for place in (0, 1)]
    fits = isinstance(trace.permutation, wanted[0]) and isinstance(trace.mask, wanted[1])
    return fits and not executor.unsupported(trace.q, trace.k, trace.v, trace.mask, trace.spec)


def traces_for(
    executor: bs.Executor[Any, Any], front: Front, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True
) -> Iterator[Choice]:
    """Traces that `executor` takes."""
    for trace in traces(front, q, k, v, selectors_for(front, executor), causal=causal):
        if runs(executor, trace):
            yield trace


def run(executor: bs.Executor[Any, Any], trace: Choice) -> bs.AttentionOutput:
    """An executor on the choice of a trace."""
    return executor(trace.q, trace.k, trace.v, trace.mask, trace.spec)


def test_every_stage_has_an_example() -> None:
    for role, examples in (
        (bs.Permuter, stages.PERMUTERS),
        (bs.Scorer, (*stages.SCORERS, *stages.VALUE_SCORERS)),
        (bs.Selector, (*stages.SELECTORS, *stages.REFINED)),
        (bs.Executor, stages.EXECUTORS),
    ):
        missing = {x.__name__ for x in stages.exported(role)} - {type(x).__name__ for x in examples}
        assert not missing, f"an argument has no default: add an example of {missing} to tests/stages.py"
    functions = {n: x for n, x in vars(bs).items() if inspect.isfunction(x)}
    presets = {n for n, x in functions.items() if x.__module__.startswith("blocksparse.presets.")}
    named = {*every_preset, *video_presets, "triangle_mix"}  # the last one gives a Schedule
    assert presets == named, "add the preset to blocksparse.testing.every_preset or video_presets"


@any_direction
@each_front
def test_every_composition_means_what_it_says(front: Front, causal: bool) -> None:
    """The reference is one masked softmax over the pairs that permutation and mask mean.

    Only visible blocks are members, and every causal query keeps its own key. Every selector with every order
    and with every scorer where that is causal, else what `selectors_for` names.
    """
    q, k, v = make_qkv(**SIZES | {"B": 1}, M=60, dtype=torch.float64)
    for trace in traces(front, q, k, v, selectors_in_turn(front) if causal else None, causal=causal):
        grid, pairs = trace.mask.grid, kept_pairs(trace.mask)
        want = masked_attention(q, k, v, pairs, trace.spec.scale)
        torch.testing.assert_close(trace.output.out, want, rtol=0, atol=1e-12)
        assert not bool((trace.mask.keep & ~grid.visible).any())
        if causal:
            own = torch.arange(grid.q_len) + grid.k_len - grid.q_len
            assert bool(pairs[:, :, torch.arange(grid.q_len), own].all())
            assert bool(not_none(trace.output.lse).isfinite().all())


@pytest.mark.slow
@each_of_group("front", "executor", "causal", groups=DIRECTED_RUNS)
def test_every_executor_agrees(front: Front, executor: bs.Executor[Any, Any], causal: bool, device: str) -> None:
    q, k, v = make_qkv(**SMALL, M=30, device=device)  # a chunk that others compile for too
    for trace in traces_for(executor, front, q, k, v, causal=causal):
        got = run(executor, trace)
        visited = trace.mask if got.visited is None else got.visited
        q64, k64, v64 = q.double(), k.double(), v.double()
        want = bs.ReferenceExecutor()(q64, k64, v64, visited, trace.spec)
        yardstick = masked_attention(q, k, v, kept_pairs(visited), trace.spec.scale)
        assert_within_budget(got.out, want.out, yardstick)
        if got.lse is not None:
            torch.testing.assert_close(got.lse.double(), not_none(want.lse), rtol=1e-5, atol=1e-5)


@each_run
def test_dense_limit(front: Front, executor: bs.Executor[Any, Any], device: str) -> None:
    q, k, v = make_qkv(**SMALL, device=device)
    want, yardstick = (
        scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True)
        for dtype in (torch.float64, q.dtype)
    )
    (trace,) = traces(front, q, k, v, [bs.Ranked(bs.Everything())])
    if not runs(executor, trace):
        pytest.skip("does not take such blocks")
    got = run(executor, trace)
    if got.visited is not None and not torch.equal(got.visited.keep, trace.mask.keep):
        pytest.skip("stopped early")
    assert_within_budget(got.out, want, yardstick)


@each_front
def test_selectors_reach_the_dense_limit(front: Front) -> None:
    given = stages.needs(front[1], bs.Scorer, 1)
    everything: list[bs.Selector[Any, Any]] = [bs.TopCdf(1.0), bs.TopCdf(1), bs.TopK(share=1.0), bs.TopK(10**6)]
    fitting = [s for s in everything if issubclass(given, stages.needs(s, bs.Selector, 0))]
    for trace in traces(front, *make_qkv(**SIZES), fitting):
        assert torch.equal(trace.mask.keep, trace.mask.grid.visible.expand_as(trace.mask.keep))


@each_run
def test_causality_by_perturbation(front: Front, executor: bs.Executor[Any, Any], device: str) -> None:
    """With the choice of blocks held, changing every token from `t` on leaves earlier rows bit-identical."""
    q, k, v = make_qkv(**SMALL, device=device)
    t = 53
    noise = make_qkv(**SMALL, device=device, seed=1)
    q2, k2, v2 = (torch.cat((x[:, :, :t], y[:, :, t:]), dim=2) for x, y in zip((q, k, v), noise, strict=True))
    for trace in traces_for(executor, front, q, k, v):
        before = run(executor, trace)
        held = trace.mask if before.visited is None else before.visited
        if held is not trace.mask:  # where an early stop chooses too, its choice is held as well
            rank = trace.mask.rank.where(~held.keep, -1)
            held = bs.RankedBlockMask(held.keep, held.grid, rank)
            before = executor(q, k, v, held, trace.spec)
        after = executor(q2, k2, v2, held, trace.spec).out
        assert torch.equal(before.out[:, :, :t], after[:, :, :t])
        assert not torch.equal(before.out[:, :, t:], after[:, :, t:])


@each_executor
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_an_output_sees_no_bad_number_of_a_later_block(
    executor: bs.Executor[Any, Any], bad: float, device: str
) -> None:
    """In original order keys and values that are not finite leave earlier rows of blocks bit-identical."""
    whole = half_of(stages.PERMUTERS[0], device)
    if not runs(executor, whole):
        pytest.skip("does not take such blocks")
    before = run(executor, whole)
    k, v = (torch.cat((x[:, :, :64], torch.full_like(x[:, :, 64:], bad)), dim=2) for x in (whole.k, whole.v))
    for keys, values in ((k, whole.v), (whole.k, v)):
        after = executor(whole.q, keys, values, whole.mask, whole.spec)
        assert torch.equal(after.out[:, :, :64], before.out[:, :, :64])


@cache
def chosen_by_row(scorer: bs.Scorer[Any, Any]) -> list[Choice]:
    """What a scorer makes of a prompt in original order, by each selector that chooses for each row by itself."""
    return list(traces((stages.PERMUTERS[0], scorer), *make_qkv(**SIZES), stages.by_row(scorer)))


@each_scorer
@each_of_group("later", groups=first_then((1e30, float("nan")), (1.0, float("inf"))))
def test_selection_sees_no_future_block(scorer: bs.Scorer[Any, Any], later: float) -> None:
    if isinstance(scorer, stages.PROBES):
        pytest.skip("chooses by what the last queries see")
    q, k, v = make_qkv(**SIZES)
    noise = make_qkv(**SIZES, seed=1)
    t = 64  # a multiple of every block
    q2, k2, v2 = (
        torch.cat((x[:, :, :t], y[:, :, t:] * later), dim=2) for x, y in zip((q, k, v), noise, strict=True)
    )
    changed = traces((stages.PERMUTERS[0], scorer), q2, k2, v2, stages.by_row(scorer))
    for before, after in zip(chosen_by_row(scorer), changed, strict=True):
        rows = t // before.mask.grid.q_block
        assert torch.equal(before.mask.keep[:, :, :rows], after.mask.keep[:, :, :rows])
        assert torch.equal(before.output.out[:, :, :t], after.output.out[:, :, :t])


@cache
def half_of(permuter: bs.Permuter[Any], device: str) -> Choice:
    """A prompt in an order, half of its blocks kept: as large as in other laws, which compile less so."""
    (whole,) = traces(
        (permuter, stages.AnyOrder(16)), *make_qkv(**SMALL, device=device), [bs.Ranked(bs.TopK(share=0.5))]
    )
    return whole


@each_executor
@pytest.mark.parametrize("permuter", stages.KEYS_ONLY, ids=stages.name)
@each_of_group("start", groups=first_then((1, 40, 64), (32, 63, 69)))
def test_chunked_equals_unchunked(
    permuter: bs.Permuter[Any], executor: bs.Executor[Any, Any], start: int, device: str
) -> None:
    """Rows stand on the grid of the whole prompt, so a chunk takes its rows of the mask, wherever it starts."""
    if isinstance(executor, bs.FlexExecutor) and (start != 40 or not isinstance(permuter, bs.Identity)):
        pytest.skip("it compiles for each length and order: a start inside of a block, which other laws have too")
    whole = half_of(permuter, device)
    k, v, chunk = whole.k, whole.v, whole.q[:, :, start:]
    first = start // 16
    permutation = whole.permutation
    if permutation.group is not None:
        kept = permutation.k_index[:, :, start // permutation.group :]
        permutation = bs.Permutation(kept, group=permutation.group)
    grid = grid_of(chunk, k, 16, permutation=permutation)
    mask = bs.RankedBlockMask(whole.mask.keep[:, :, first:], grid, whole.mask.rank[:, :, first:] - grid.cols)
    trace = Choice(chunk, k, v, whole.spec, permutation, whole.scores, mask)
    if not runs(executor, trace):
        pytest.skip("does not take such a permutation")
    torch.testing.assert_close(run(executor, trace).out, whole.output.out[:, :, start:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("selector", stages.POSITIONS, ids=stages.name)
@each("start", [1, 16, 40, 63, 64, 100, 128])
def test_geometry_does_not_depend_on_chunks(selector: bs.Selector[Any, Any], start: int) -> None:
    q, k, v = make_qkv(**SIZES | {"N": 129})
    pipeline = bs.Pipeline(bs.Identity(), bs.NoScorer(16), selector, bs.ReferenceExecutor())
    whole, chunk = pipeline.trace(q, k, v), pipeline.trace(q[:, :, start:], k, v)
    later = whole.mask.keep[:, :, start // 16 + (start % 16 > 0) :]
    assert torch.equal(chunk.mask.keep[:, :, chunk.mask.grid.rows - later.shape[2] :], later)
    torch.testing.assert_close(chunk.output.out[:, :, 16:], whole.output.out[:, :, start + 16 :])


@each_scorer
def test_aligned_chunks_choose_alike(scorer: bs.Scorer[Any, Any]) -> None:
    if isinstance(scorer, stages.PROBES):
        pytest.skip("chooses by what the last queries see")
    q, k, v = make_qkv(**SIZES)
    front, by_row = (stages.PERMUTERS[0], scorer), stages.by_row(scorer)
    for whole, first, second in zip(
        traces(front, q, k, v, by_row),
        traces(front, q[:, :, :64], k[:, :, :64], v[:, :, :64], by_row),
        traces(front, q[:, :, 64:], k, v, by_row),
        strict=True,
    ):
        rows, cols = 64 // whole.mask.grid.q_block, 64 // whole.mask.grid.k_block
        assert torch.equal(first.mask.keep, whole.mask.keep[:, :, :rows, :cols])
        assert torch.equal(second.mask.keep, whole.mask.keep[:, :, rows:])


@pytest.mark.slow
@each_front
def test_no_causal_row_is_empty_where_all_is_equal(front: Front) -> None:
    q, k, v = (0.0 * x for x in make_qkv(**SIZES, M=60))
    for trace in traces(front, q, k, v):
        assert bool(not_none(trace.output.lse).isfinite().all())
        assert bool(trace.output.out.isfinite().all())


@each_executor
def test_a_row_with_nothing_kept(executor: bs.Executor[Any, Any], device: str) -> None:
    """gives 0 and -inf, never NaN and never uninitialised memory."""
    q, k, v = make_qkv(**SMALL | {"N": 97}, device="cpu" if isinstance(executor, bs.CpuExecutor) else device)
    grid = grid_of(q, k, 16)
    keep = grid.visible.expand(1, 2, -1, -1).clone()
    keep[:, :, 4:6] = False
    keep[:, 0] = False
    mask = bs.RankedBlockMask(keep, grid, torch.full_like(keep, -1, dtype=torch.int32))
    got = executor(q, k, v, mask, bs.AttentionSpec(scale=0.25))
    assert bool((got.out[:, :, 64:96] == 0).all())
    assert bool((got.out[:, 0] == 0).all())
    assert bool(got.out.isfinite().all())
    if got.lse is not None:
        assert bool((got.lse[:, :, 64:96] == float("-inf")).all())
        assert bool(got.lse[:, 1:, :64].isfinite().all())


@pytest.mark.slow
@each_front
def test_batch_entries_do_not_meet(front: Front) -> None:
    q, k, v = make_qkv(**SIZES)
    if isinstance(front[0], stages.Shuffle):
        pytest.skip("draws one order for the whole batch")
    for both, alone in zip(traces(front, q, k, v), traces(front, q[1:], k[1:], v[1:]), strict=True):
        assert torch.equal(both.mask.keep[1:], alone.mask.keep)
        torch.testing.assert_close(both.output.out[1:], alone.output.out)


@pytest.mark.slow
@each_front
def test_ties_and_repeats_choose_alike(front: Front, device: str) -> None:
    """All-equal keys: twice the same, and the same on CPU and GPU for the same scores."""
    q, k, v = (torch.ones_like(x) for x in make_qkv(**SIZES))
    there = [x.to(device) for x in (q, k, v)]
    for first, other in zip(traces(front, q, k, v), traces(front, there[0], there[1], there[2]), strict=True):
        pairs = zip(
            attrs.astuple(first.scores, recurse=False), attrs.astuple(other.scores, recurse=False), strict=True
        )
        if all(torch.equal(x, y.cpu()) for x, y in pairs if isinstance(x, Tensor)):  # else rounded differently
            assert torch.equal(first.mask.keep, other.mask.keep.cpu())


@each_scorer
@pytest.mark.parametrize("asked", [{}, {"window": 40}, {"causal": False}], ids=repr)
def test_plain_torch_scores_shuffled_tokens_as_kernels_do(
    scorer: bs.Scorer[Any, Any], asked: dict[str, Any]
) -> None:
    """In float64 no kernel runs; every query head has an order, and every KV head another."""
    q, k, _ = make_qkv(B=2, N=130, M=75, Hq=4, Hkv=2, D=16)
    order, spec = shuffled(q, k), bs.AttentionSpec(scale=0.25, **asked)
    got, want = scorer(q, k, order, spec), scorer(q.double(), k.double(), order, spec)
    seen = got.grid.visible.expand_as(got.values)
    torch.testing.assert_close(got.values[seen].double(), want.values[seen].double(), rtol=1e-4, atol=1e-5)


@each_scorer
def test_same_scores_same_mask_on_every_device(scorer: bs.Scorer[Any, Any], device: str) -> None:
    if device == "cpu":
        pytest.skip("no GPU here")
    q, k, _ = make_qkv(**SIZES)
    here = scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25))
    there = scorer(q.to(device), k.to(device), bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25))
    tensors = attrs.asdict(here, recurse=False, filter=lambda _, value: isinstance(value, Tensor))
    moved = attrs.evolve(there, **{name: value.to(device) for name, value in tensors.items()})
    for selector in stages.selectors_for(scorer):
        assert torch.equal(selector(here).keep, selector(moved).keep.cpu())


def survives(front: Front, value: float) -> None:
    q, k, v = make_qkv(**SIZES)
    q[:, :, 70, 3] = value
    k[:, :, 50, 2] = value
    v[:, :, 20, 1] = value
    for trace in traces(front, q, k, v):
        assert trace.output.out.shape == q.shape
        assert bool((trace.mask.keep & ~trace.mask.grid.visible).sum() == 0)


@pytest.mark.slow
@each_front
def test_nan_never_hangs_or_crashes(front: Front) -> None:
    survives(front, float("nan"))


@pytest.mark.slow
@each_of_group("front", groups=[group for group in FRONTS if not group.marks])
@each("value", [float("inf"), -float("inf"), 1e38])
def test_huge_numbers_never_hang_or_crash(front: Front, value: float) -> None:
    survives(front, value)


@pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)
@each_of_group("N", groups=first_then((1, 129), (63, 65, 127, 200, 500)))
def test_presets_at_awkward_lengths(preset: Any, N: int) -> None:
    for M in {1, N // 2 + 1, N}:
        q, k, v = make_qkv(N=N, M=M, Hq=7, Hkv=1, D=80)
        trace = preset(executor=bs.ReferenceExecutor()).trace(q, k, v)
        dense = masked_attention(q, k, v, torch.ones(M, N, dtype=torch.bool).tril(N - M), trace.spec.scale)
        assert bool(trace.output.out.isfinite().all())
        torch.testing.assert_close(
            trace.error(),
            ((trace.output.out - dense).abs().sum((-1, -2)) / dense.abs().sum((-1, -2))).double(),
            rtol=1e-3,
            atol=1e-5,
        )
        mass = trace.covered_mass()
        assert bool(((mass > 0.5) & (mass < 1 + 1e-6)).all())


@each_scorer
def test_padding_and_tail_never_change_a_real_block(scorer: bs.Scorer[Any, Any]) -> None:
    """In original order a longer prompt gives earlier rows the same scores, wherever the shorter one ended."""
    if isinstance(scorer, stages.PROBES) or getattr(scorer, "padded_tail", False):
        pytest.skip("chooses by what the last queries see, or has the released code's tail")
    q, k, _ = make_qkv(**SIZES | {"N": 129})
    long = scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25))
    for N in (64, 65, 95, 96, 97):
        short = scorer(q[:, :, :N], k[:, :, :N], bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25))
        rows, cols = N // short.grid.q_block, N // short.grid.k_block
        torch.testing.assert_close(short.values[:, :, :rows, :cols], long.values[:, :, :rows, :cols])

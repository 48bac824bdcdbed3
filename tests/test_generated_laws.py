"""The laws over compositions, sizes, layouts and values that nobody chose.

A failing law prints its case as Python, in the names of `blocksparse`, `tests.drawn.Case` and `tests.stages`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import blocksparse as bs
from tests import drawn, stages
from tests.drawn import LAWS, Case, cases
from tests.layouts import LAYOUTS
from tests.machine import GPU
from tests.meaning import assert_means, attention, pairs_of, same
from tests.specs import asked

AnyTrace = bs.Trace[Any, Any, Any]


def law(fast: int, slow: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A test that holds for `fast` draws in the fast loop, and for others besides it, `slow` in all."""

    def test_of(holds: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("draws", [fast, pytest.param(slow - fast, marks=pytest.mark.slow)])
        @functools.wraps(holds)
        def test(draws: int, device: str) -> None:
            law = settings(LAWS, max_examples=draws)(given(st.just(device), *strategies)(holds))
            # Of one seed, the slow draws would begin with the fast ones again.
            (law if draws == fast else seed(1)(law))()

        del test.__wrapped__  # pytest would read the arguments there
        return test

    return test_of


def trace_of(case: Case, device: str) -> AnyTrace:
    trace: AnyTrace = case.pipeline.trace(*case.qkv(device), **case.call)
    return trace


def run(executor: bs.Executor[Any, Any], trace: AnyTrace, mask: bs.BlockMask | None = None) -> bs.AttentionOutput:
    mask = trace.mask if mask is None else mask
    return executor(trace.q, trace.k, trace.v, mask, asked(mask, trace.spec.scale))


@law(25, 120, cases())
def test_the_output_is_attention_over_what_is_kept(device: str, case: Case) -> None:
    """Of a call too; and every causal query keeps its own key."""
    q, k, v = case.qkv(device)
    trace = case.pipeline.trace(q, k, v, **case.call)
    assert_means(trace.output, trace.permutation, trace.mask, trace.spec.scale, q, k, v)
    assert same(case.pipeline(q, k, v, **case.call), trace.output.out)
    if case.causal:
        pairs = pairs_of(trace.permutation, trace.mask, q, k)
        own = torch.arange(q.shape[2])
        assert bool(pairs[:, :, own, own + k.shape[2] - q.shape[2]].all())


@law(15, 75, cases(), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_executors_obey_any_mask(device: str, case: Case, share: float, seed: int) -> None:
    trace = trace_of(evolve(case, selector=bs.Ranked(bs.Everything())), device)
    generator = torch.Generator().manual_seed(seed)
    grid, shape = trace.mask.grid, trace.mask.keep.shape
    keep = grid.visible & (torch.rand(shape, generator=generator) < share).to(device)
    rank = torch.randint(-3, 9, shape, generator=generator, dtype=torch.int32).to(device)
    mask = bs.RankedBlockMask(keep, grid, rank)
    output = run(case.executor, trace, mask)
    assert_means(output, trace.permutation, mask, trace.spec.scale, trace.q, trace.k, trace.v)


WINDOWED = cases(
    causal=True,
    permuters=drawn.PERMUTERS[:-1],
    scorers=tuple(s for s in drawn.SCORERS if s is not stages.AnyOrder),
    executors=(bs.ReferenceExecutor(),) if GPU else (bs.ReferenceExecutor(), bs.CpuExecutor()),
)


@law(25, 75, WINDOWED, st.integers(1, 140))
def test_nothing_outside_of_a_window_is_attended_to(device: str, case: Case, window: int) -> None:
    """And the query's own key is; with everything kept, all that is inside."""
    q, k, v = case.qkv(device)
    (M, N), pipeline = (q.shape[2], k.shape[2]), case.pipeline
    distance = torch.arange(N - M, N)[:, None] - torch.arange(N)
    inside = (distance >= 0) & (distance < window)
    everything = evolve(pipeline, selector=bs.Everything(), executor=bs.ReferenceExecutor())
    for attention_of, exact in ((pipeline, False), (everything, True)):
        trace = attention_of.trace(q, k, v, window=window, **case.call)
        pairs = pairs_of(trace.permutation, trace.mask, trace.q, trace.k)
        assert not bool((pairs & ~inside).any())
        assert bool((pairs | (distance != 0)).all())
        assert not exact or torch.equal(pairs, inside.expand(pairs.shape))
        assert not bool((trace.mask.keep & ~trace.mask.grid.visible).any())
        assert_means(trace.output, trace.permutation, trace.mask, trace.spec.scale, trace.q, trace.k, trace.v)


KERNEL = bs.TritonExecutor()
ORDERED = cases(
    executors=(KERNEL,),
    permuters=(bs.Identity, bs.SegmentKeySort, stages.Shuffle),
    scorers=(stages.AnyOrder,),
    blocks=(16, 32),
    longest=65,
    sizes={"D": 16, "Dv": 16},
)


@law(2, 12, ORDERED, st.sampled_from(["float32", "float16"]), st.tuples(*3 * [st.sampled_from([*LAYOUTS])]))
def test_a_kernel_computes_the_same_wherever_numbers_lie(
    device: str, case: Case, dtype: str, layouts: tuple[str, str, str]
) -> None:
    case = evolve(case, executor=bs.ReferenceExecutor(), dtype=dtype, layouts=layouts)
    q, k, v = case.qkv(device)
    trace = case.pipeline.trace(q, k, v, **case.call)
    assume(not KERNEL.unsupported(q, k, v, trace.mask, asked(trace.mask)))
    output = run(KERNEL, trace)
    assert_means(output, trace.permutation, trace.mask, trace.spec.scale, q, k, v)
    plain = run(KERNEL, evolve(trace, q=q.contiguous(), k=k.contiguous(), v=v.contiguous()))
    assert same(output.out, plain.out)


@law(15, 75, cases())
def test_keeping_everything_is_dense_attention(device: str, case: Case) -> None:
    assume(getattr(case.permuter, "prefix", None) is None or not isinstance(case.permuter, bs.GlobalIndexMap))
    assume(getattr(case.executor, "tau", 0.0) == 0.0)
    trace = trace_of(evolve(case, selector=bs.Ranked(bs.Everything())), device)
    (M, N), q = (trace.q.shape[2], trace.k.shape[2]), trace.q
    pairs = torch.ones(*q.shape[:2], M, N, dtype=torch.bool)
    pairs = pairs.tril(N - M) if case.causal else pairs
    assert torch.equal(pairs_of(trace.permutation, trace.mask, q, trace.k), pairs)
    assert_means(trace.output, trace.permutation, trace.mask, trace.spec.scale, q, trace.k, trace.v)


@law(15, 75, cases(causal=True), st.data())
def test_the_future_changes_nothing(device: str, case: Case, data: st.DataObject) -> None:
    """With the choice held, changing every token from one on leaves the rows before it bit-identical."""
    trace = trace_of(case, device)
    held = trace.mask
    if isinstance(case.executor, bs.GatherExecutor):  # all that was visited before it stopped, in any case
        held = bs.RankedBlockMask(trace.visited.keep, trace.mask.grid, trace.mask.rank.clamp_max(-1))
    M, N = trace.q.shape[2], trace.k.shape[2]
    first = data.draw(st.integers(1, M), label="first changed query")
    changed = [x.clone() for x in (trace.q, trace.k, trace.v)]
    for x, start in zip(changed, (first, N - M + first, N - M + first), strict=True):
        x[:, :, start:] = 3 - x[:, :, start:]
    q, k, v = changed
    after = case.executor(q, k, v, held, asked(held, trace.spec.scale))
    assert same(after.out[:, :, :first], run(case.executor, trace, held).out[:, :, :first])


IN_PLACE = cases(
    causal=True,
    permuters=(bs.Identity,),
    scorers=tuple(s for s in drawn.SCORERS if s not in (*stages.PROBES, stages.AnyOrder)),
    executors=(bs.ReferenceExecutor(),),
    blocks=(1, 3, 16, 20),
    sizes={"M": 129, "N": 129},
)


@law(20, 75, IN_PLACE, st.integers(0, 70), st.integers(71, 129))
def test_a_chunk_is_part_of_its_prompt(device: str, case: Case, begin: int, end: int) -> None:
    """Rows that lie wholly in a chunk, with all they may see, choose as in the prompt, wherever it lies."""
    assume(chooses_by_row(case.selector))
    q, k, v = case.qkv(device)
    whole, rest = case.pipeline.trace(q, k, v, **case.call), k.shape[2] - end
    chunk = case.pipeline.trace(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], **case.call, remaining=rest).mask
    scored, q_block = whole.scores.grid, chunk.grid.q_block  # refined masks have smaller blocks
    first = -(-begin // scored.q_block) * scored.q_block
    whole_rows = range(first + scored.q_block, end + 1, scored.q_block)
    last = max((x for x in whole_rows if -(-x // scored.k_block) * scored.k_block <= end), default=first)
    rows = slice(first // q_block, last // q_block)
    mine = chunk.keep[:, :, rows.start - begin // q_block : rows.stop - begin // q_block]
    assert torch.equal(mine, whole.mask.keep[:, :, rows, : mine.shape[-1]])
    assert not bool(whole.mask.keep[:, :, rows, mine.shape[-1] :].any())


def chooses_by_row(selector: Any) -> bool:
    """Whether each row of blocks chooses by itself, by where it stands in the prompt."""
    parts = [selector, *(getattr(selector, name, None) for name in ("first", "second", "inner", "rule"))]
    if any(isinstance(s, bs.GlobalTopCdf) or getattr(s, "of_all_keys", False) for s in parts):
        return False
    if any(getattr(s, "released", False) for s in parts):  # the authors count rows from where the chunk starts
        return False
    return all(chooses_by_row(s) for s in parts[1:] if isinstance(s, bs.Selector))


@law(15, 75, cases(executors=tuple(e for e in drawn.EXECUTORS if isinstance(e, bs.GatherExecutor))))
def test_an_early_stop_reports_what_it_visited(device: str, case: Case) -> None:
    """Visiting just that gives the same bits; it is the head of each row's order."""
    trace = trace_of(case, device)
    rank = trace.mask.rank.where(trace.mask.keep, torch.iinfo(torch.int32).max)
    order = rank.argsort(dim=-1, stable=True)
    visited = trace.visited.keep.gather(-1, order)
    assert bool((visited[..., :-1] >= visited[..., 1:]).all()), "left a block out on its way"
    forced = trace.mask.keep & (trace.mask.rank < 0)
    assert not bool((forced & ~trace.visited.keep).any())
    reached = bs.RankedBlockMask(trace.visited.keep, trace.mask.grid, trace.mask.rank)
    again = run(bs.GatherExecutor(0.0), trace, reached)
    assert same(again.out, trace.output.out)


def assert_same_call(one: AnyTrace, other: AnyTrace) -> None:
    """The same choice and the same output, bit for bit."""
    assert torch.equal(one.mask.keep, other.mask.keep)
    assert torch.equal(one.visited.keep, other.visited.keep)
    assert same(one.output.out, other.output.out)
    assert (one.output.lse is None) == (other.output.lse is None)
    if one.output.lse is not None and other.output.lse is not None:
        assert same(one.output.lse, other.output.lse)


@law(25, 75, cases())
def test_where_numbers_lie_in_memory_changes_nothing(device: str, case: Case) -> None:
    q, k, v = case.qkv(device)
    plain = case.pipeline.trace(q.contiguous(), k.contiguous(), v.contiguous(), **case.call)
    assert_same_call(case.pipeline.trace(q, k, v, **case.call), plain)


@law(15, 75, cases(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_autocast_changes_nothing(device: str, case: Case, dtype: torch.dtype) -> None:
    plain, (q, k, v) = trace_of(case, device), case.qkv(device)
    with torch.autocast(device, dtype):
        cast = case.pipeline.trace(q, k, v, **case.call)
        assert same(case.pipeline(q, k, v, **case.call), plain.output.out)
    assert_same_call(cast, plain)


@law(4, 20, cases())
def test_threads_change_nothing(device: str, case: Case) -> None:
    inputs = [evolve(case, seed=case.seed + i, sizes=case.sizes | {"B": 1 + i}).qkv(device) for i in range(3)]
    alone = [case.pipeline.trace(*qkv, **case.call) for qkv in inputs]
    pipeline = case.pipeline

    def call(qkv: tuple[Tensor, Tensor, Tensor]) -> AnyTrace:
        with torch.no_grad():
            trace: AnyTrace = pipeline.trace(*qkv, **case.call)
            return trace

    with ThreadPoolExecutor(3) as threads:
        for together, expected in zip(threads.map(call, 2 * inputs), 2 * alone, strict=True):
            assert_same_call(together, expected)


@law(10, 50, cases(dtype="float32"), st.data())
def test_what_is_not_finite_reaches_only_who_sees_it(device: str, case: Case, data: st.DataObject) -> None:
    """A key, or a query, of NaN or infinity: the other rows are attention over what is kept, as ever."""
    q, k, v = (x.clone() for x in case.qkv(device))
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    x = data.draw(st.sampled_from([q, k]))
    head = data.draw(st.integers(0, x.shape[1] - 1))
    token = data.draw(st.integers(0, x.shape[2] - 1))
    x[0, head, token, 0] = value
    trace = case.pipeline.trace(q, k, v, **case.call)
    pairs = pairs_of(trace.permutation, trace.visited, q, k)
    bad = torch.zeros(pairs.shape[:3], dtype=torch.bool)
    if x is q:
        bad[0, head, token] = True
    else:
        group = q.shape[1] // k.shape[1]
        bad[0, head * group : (head + 1) * group] = pairs[0, head * group : (head + 1) * group, :, token]
    q, k = (y.nan_to_num(0.0, 0.0, 0.0) for y in (q, k))
    want, unit = attention(q, k, v, pairs, trace.spec.scale)
    error = (trace.output.out.cpu().double() - want).abs()
    assert bool((error <= torch.finfo(torch.float32).eps * unit + 1e-30)[~bad].all())


@law(10, 50, cases(values="zeros"))
def test_zeros_have_no_sign(device: str, case: Case) -> None:
    signed, (q, k, v) = trace_of(case, device), case.qkv(device)
    plain = case.pipeline.trace(q.abs(), k.abs(), v.abs(), **case.call)
    assert torch.equal(signed.mask.keep, plain.mask.keep)
    assert torch.equal(signed.output.out, plain.output.out)

"""Windows, softcaps and sinks: a law for every executor that has them, and a plain refusal by the others."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.auto import dense_operations
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.observe import Audit, AuditedAttention
from blocksparse.testing import assert_within_budget, every_preset, make_qkv, masked_attention
from tests import stages
from tests.machine import DTYPES, GPU, needs_flex, needs_gpu
from tests.meaning import assert_means, assert_same_bits
from tests.on_kernels import pretend_gpu
from tests.specs import asked, kept_pairs, not_none, wrong

# Softcaps and sinks


SINKS = torch.tensor([-1.0, 0.5, 2.0, 5.0], dtype=torch.float64)
Change = dict[str, Any]
CHANGES: tuple[Change, ...] = ({"softcap": 2.0}, {"sinks": SINKS}, {"softcap": 1.5, "sinks": SINKS})
each_change = pytest.mark.parametrize("change", CHANGES, ids=("softcap", "sinks", "both"))
or_window = pytest.mark.parametrize(
    "change", [*CHANGES, {"window": 20}], ids=("softcap", "sinks", "both", "window")
)
EXECUTORS: tuple[Any, ...] = (bs.ReferenceExecutor, bs.CpuExecutor)
PLAIN = bs.GatherExecutor(), bs.Int8Executor(fp8_pv=False), bs.FlashAttention4Executor(), bs.CudnnExecutor()
OTHERS: tuple[Any, ...] = (*PLAIN, bs.FlexExecutor())
PORTABLE = bs.TritonExecutor(bs.TritonTiles(16, 16, num_warps=4, num_stages=2))
each_executor = pytest.mark.parametrize("make", EXECUTORS, ids=lambda make: make.__name__)


def all_of_it(executor: bs.Executor[Any, Any], block: int = 16) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(bs.Identity(), bs.NoScorer(block), bs.Everything(), executor)


class SomeRows(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """Every third row keeps nothing, the others two blocks in three."""

    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        grid = scores.grid
        row, col = (torch.arange(n, device=scores.values.device) for n in (grid.rows, grid.cols))
        keep = grid.visible & (row[:, None] % 3 != 1) & ((row[:, None] + col) % 3 != 0)
        return bs.BlockMask(keep.expand(grid.batch, grid.q_heads, -1, -1), grid)


def written_out(trace: bs.Trace[Any, Any, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition, over all pairs at once."""
    q, k, v = (x.to(dtype) for x in (trace.q, trace.k, trace.v))
    spec, pairs = trace.spec, kept_pairs(trace.mask)
    sinks = None if spec.sinks is None else SINKS.to(q)
    out = masked_attention(q, k, v, pairs, spec.scale, softcap=spec.softcap, sinks=sinks)
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    lse = logits.masked_fill(~pairs, float("-inf")).logsumexp(-1)
    return out, lse if sinks is None else lse.logaddexp(sinks.view(1, -1, 1))


@each_change
@each_executor
@pytest.mark.parametrize(("start", "window"), [(0, None), (37, None), (11, 33)])
def test_the_law(make: Callable[..., Any], change: Change, start: int, window: int | None) -> None:
    q, k, v = make_qkv(N=200, D=16, dtype=torch.float32)
    q = q[:, :, start:] * 4  # logits far beyond the cap
    for permuter in (bs.Identity(), bs.SegmentKeySort(64, last_q=16)):
        pipeline = bs.Pipeline(permuter, bs.NoScorer(16), SomeRows(), make())
        trace = pipeline.trace(q, k, v, window=window, **change)
        kept = trace.output.out.any(-1)
        assert bool(kept.any() and not kept.all())  # there are queries of both kinds
        want, plain = (written_out(trace, dtype) for dtype in (torch.float64, torch.float32))
        assert_within_budget(trace.output.out, want[0], plain[0])
        assert_within_budget(not_none(trace.output.lse), want[1], plain[1])


@each_change
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 33])
def test_the_law_for_the_portable_kernel(
    window: int | None, dtype: torch.dtype, change: Change, device: str
) -> None:
    """Grouped heads, a prompt and a chunk that end and begin inside a block, rows that keep nothing, and lse."""
    q, k, v = make_qkv(N=83, D=16, dtype=dtype, device=device)
    for start, permuter in ((0, bs.SegmentKeySort(64, last_q=16)), (37, bs.Identity())):
        pipeline = bs.Pipeline(permuter, bs.NoScorer(16), SomeRows(), PORTABLE)
        trace = pipeline.trace(q[:, :, start:] * 4, k, v, window=window, **change)
        want, plain = (written_out(trace, each) for each in (torch.float64, dtype))
        assert_within_budget(trace.output.out, want[0], plain[0])
        torch.testing.assert_close(not_none(trace.output.lse).double(), want[1], rtol=1e-3, atol=1e-5)
        output = pipeline.with_lse(q[:, :, start:] * 4, k, v, window=window, **change)
        assert_same_bits(output, trace.output)


@needs_gpu
@pytest.mark.slow
@each_change
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 700])
def test_the_law_on_a_gpu(window: int | None, D: int, change: Change, device: str) -> None:
    """The tiles that calls get, on Hopper too, where keys are sorted and where they are in place."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = make_qkv(N=1500, M=1100, D=D, dtype=dtype, device=device)
        for order in (bs.Identity(), bs.SegmentKeySort(256)):
            for executor in (bs.TritonExecutor(), bs.AutoExecutor(dense_below=0)):
                pipeline: Any = bs.Pipeline(order, bs.MeanPoolScorer(128), bs.TopK(4), executor)
                trace = pipeline.trace(4 * q, k, v, window=window, **change)
                want, plain = (written_out(trace, each) for each in (torch.float64, dtype))
                assert_within_budget(trace.output.out, want[0], plain[0])
                torch.testing.assert_close(trace.output.lse.double(), want[1], rtol=1e-3, atol=1e-3)


@needs_gpu
@each_change
@pytest.mark.parametrize("causal", [True, False])
def test_dense_calls_on_a_gpu_hold_no_logits(causal: bool, change: Change, device: str) -> None:
    """Exactly, in memory that does not grow with the square of the prompt."""
    q, k, v = make_qkv(N=2000, M=1500, D=64, dtype=torch.bfloat16, device=device)
    everything = all_of_it(bs.AutoExecutor())
    trace = everything.trace(4 * q, k, v, causal=causal, **change)
    assert trace.dense_because is not None
    want, plain = (written_out(trace, each)[0] for each in (torch.float64, torch.bfloat16))
    assert_within_budget(trace.output.out, want, plain)
    peaks = []
    for N in (8192, 16384):
        q, k, v = make_qkv(N=N, D=64, dtype=torch.bfloat16, device=device)
        everything(q, k, v, causal=causal, **change)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        everything(q, k, v, causal=causal, **change)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.5 * peaks[0]


@pytest.mark.skipif(GPU, reason="test_the_law_on_a_gpu runs it")
@or_window
def test_triton_takes_the_portable_kernel(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(N=200, D=64, dtype=torch.float16)
    pretend_gpu(monkeypatch, TARGETS["sm_90"])  # where the Hopper kernel would be the faster one
    trace = all_of_it(bs.TritonExecutor(), 128).trace(4 * q, k, v, **change)
    assert float((trace.output.out - written_out(trace, torch.float64)[0]).abs().max()) < 4e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@each_change
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_keys_stay_with_the_queries_that_see_them(value: float, change: Change, device: str) -> None:
    """Neither earlier queries nor those behind the window change by a bit; a cap does not make a NaN a number."""
    q, k, v = make_qkv(N=80, D=16, dtype=torch.float32, device=device)
    pipeline = all_of_it(PORTABLE)
    clean = pipeline.with_lse(q, k, v, window=20, **change)
    k[:, :, 40] = value
    bad = pipeline.with_lse(q, k, v, window=20, **change)
    assert_same_bits(bad, clean, [i for i in range(80) if not 40 <= i < 60])
    assert bool(bad.out[:, :, 40:60].isnan().all()) or value == value


@pytest.mark.parametrize("change", [{}, *CHANGES], ids=("none", "softcap", "sinks", "both"))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("start", [0, 37])
def test_dense_attention_has_them(start: int, causal: bool, change: Change) -> None:
    """Also where an executor would have the pipeline attend densely."""
    q, k, v = make_qkv(N=150, D=16, dtype=torch.float64)
    q = 4 * q[:, :, start:]
    for window in (None, 40) if causal else (None,):
        pipeline = all_of_it(bs.ReferenceExecutor())
        more = {"causal": causal, "window": window, **change}
        trace = pipeline.trace(q, k, v, **more)
        want = written_out(trace, torch.float64)[0]
        dense = dense_attention(q, k, v, bs.AttentionSpec(scale=0.25, **more))
        torch.testing.assert_close(dense, want, rtol=1e-12, atol=1e-12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bs.ReferenceExecutor, "dense_because", lambda *_, **__: "little work")
            dense = pipeline(q, k, v, **more)
            traced = pipeline.trace(q, k, v, **more)
        torch.testing.assert_close(dense, want, rtol=1e-12, atol=1e-12)
        assert traced.dense_because == "little work"
        assert float(traced.error().max()) < 1e-12


@each_change
def test_auto_takes_what_knows_them(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(N=100, D=16, dtype=torch.float64)
    executor = bs.AutoExecutor()
    trace = bs.Pipeline(bs.Identity(), bs.NoScorer(16), SomeRows(), executor).trace(q, k, v, **change)
    torch.testing.assert_close(trace.output.out, written_out(trace, torch.float64)[0])
    assert isinstance(executor.choose(q, k, v, trace.mask, trace.spec).executor, bs.CpuExecutor)
    monkeypatch.setattr(bs.CpuExecutor, "unsupported", lambda *_: ["no"])
    choice = executor.choose(q, k, v, trace.mask, trace.spec)
    assert isinstance(choice.executor, bs.ReferenceExecutor)
    assert choice.refused == {"CpuExecutor": ["no"]}


@or_window
def test_groups_of_heads_have_the_sinks_of_their_heads(change: Change) -> None:
    """In the order in which a group names them, in dense heads too."""
    q, k, v = make_qkv(N=100, Hq=4, Hkv=2, D=16, dtype=torch.float64)
    everything = all_of_it(bs.CpuExecutor())
    want = everything(4 * q, k, v, **change)
    groups: tuple[bs.HeadGroups, ...] = (
        bs.HeadGroups({(1,): everything, (0,): None}),
        bs.HeadGroups({(1, 0): everything}),
        bs.HeadGroups({(1, 0): None}),
        bs.HeadGroups.dense_where((True, False), everything),
    )
    for group in groups:
        torch.testing.assert_close(group(4 * q, k, v, **change), want)
        assert float(group.trace(4 * q, k, v, **change).error().max()) < 1e-12


@or_window
def test_a_trace_measures_against_dense_attention_with_the_same_logits(change: Change) -> None:
    q, k, v = make_qkv(N=100, D=16, dtype=torch.float64)
    everything = all_of_it(bs.CpuExecutor())
    trace = everything.trace(q, k, v, **change)
    assert float(trace.error().max()) < 1e-13
    assert float((trace.covered_mass() - 1).abs().max()) < 1e-12
    assert torch.equal(trace.density(), torch.ones(1, 4, dtype=torch.float64))
    plain = everything(q, k, v)
    assert float((plain - trace.output.out).abs().max()) > 0.01


def test_a_softcap_may_be_any_real_number() -> None:
    q, k, v = make_qkv(N=64, D=16)
    pipeline = bs.mean_pooling(block=16, executor=bs.CpuExecutor())
    assert torch.equal(pipeline(q, k, v, softcap=wrong(Fraction(3, 2))), pipeline(q, k, v, softcap=1.5))


def test_they_are_refused_in_one_sentence() -> None:
    q, k, v = make_qkv(N=64, D=16)
    pipeline: Any = bs.Pipeline(bs.Identity(), bs.NoScorer(64), bs.Ranked(bs.Everything()), bs.CpuExecutor())
    for call in (pipeline, pipeline.trace, pipeline.with_lse):
        with pytest.raises(ValueError, match="'softcap' must be a number from 1e-30 to 1e30, or None: 0"):
            call(q, k, v, softcap=0)
        with pytest.raises(ValueError, match="from 1e-30"):  # as a divisor in fp32 it would be 0
            call(q, k, v, softcap=1e-50)
        message = r"'sinks' must be a number up to 2\*\*100, or -inf for no sink, or one per query head"
        with pytest.raises(TypeError, match=message):
            call(q, k, v, sinks="1.0")
        with pytest.raises(ValueError, match="'sinks' has 2 entries for 4 query heads"):
            call(q, k, v, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="'sinks' has 2 entries for 4 query heads"):
        pipeline.executor(q, k, v, pipeline.choose(q, k).mask, bs.AttentionSpec(scale=1.0, sinks=[1.0, 2.0]))
    with pytest.raises(ValueError, match="'sinks' must have as many entries for each of 3 KV heads: 4"):
        bs.AttentionSpec(scale=1.0, sinks=SINKS).of_heads((0,), 3)
    for other in OTHERS:
        for change in ({"softcap": 1.0}, {"sinks": 0.0}):
            with pytest.raises(ValueError, match="it knows no softcap and no attention sinks"):
                attrs.evolve(pipeline, executor=other)(q, k, v, **change)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sink_of_minus_infinity_is_none(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the lowest number of a dtype; a query without a kept key has an lse of -inf then."""
    if not compiled:
        monkeypatch.setattr("blocksparse.execute.cpu.cpu_kernel_refuses", lambda *_: ["it is left out"])
    q, k, v = make_qkv(N=64, D=16)
    pipeline = bs.mean_pooling(block=16, executor=bs.CpuExecutor())
    mask = pipeline.choose(q, k).mask
    empty = bs.BlockMask(torch.zeros_like(mask.keep), mask.grid)
    lowest = [torch.full((4,), torch.finfo(x).min, dtype=x) for x in (torch.bfloat16, torch.float32)]
    for sinks in (-float("inf"), [-float("inf")] * 4, *lowest):
        torch.testing.assert_close(pipeline(q, k, v, sinks=sinks), pipeline(q, k, v), rtol=0, atol=1e-6)
        for executor in (bs.CpuExecutor(), bs.ReferenceExecutor()):
            output = executor(q, k, v, empty, bs.AttentionSpec(scale=0.25, sinks=sinks))
            assert not output.out.any()
            assert bool((not_none(output.lse) == -float("inf")).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_that_a_dtype_rounds_are_taken(dtype: torch.dtype) -> None:
    for size in (-1e30, 1e30):
        spec = bs.AttentionSpec(scale=1.0, sinks=torch.full((4,), size, dtype=dtype))
        assert spec.sinks == bs.AttentionSpec(scale=1.0, sinks=[float(torch.tensor(size, dtype=dtype))] * 4).sinks


@pytest.mark.parametrize("sink", [-3.0, 2.0, 6.0])
def test_a_sink_covers_nothing(sink: float) -> None:
    """Traces and audits say how much of the weights on pairs is covered, which a sink does not change."""
    q, k, v = make_qkv(N=100, D=16)
    sparse = bs.Pipeline(bs.Identity(), bs.NoScorer(16), SomeRows(), bs.CpuExecutor())
    want = sparse.trace(q, k, v).covered_mass()
    torch.testing.assert_close(sparse.trace(q, k, v, sinks=sink).covered_mass(), want, rtol=1e-5, atol=1e-5)
    audit = Audit(rows=100, every=1)
    AuditedAttention(sparse, 0, audit)(q, k, v, sinks=sink)
    (layer,) = audit.layers()
    assert 0.1 < float(want.mean()) < 0.9
    assert abs(not_none(layer.covered_mass).value - float(want.mean())) < 1e-3


# Sliding windows


SCALE = 0.25
ORDERS: tuple[bs.Permuter[Any], ...] = (
    bs.Identity(),
    bs.SegmentKeySort(64, last_q=16),
    bs.SegmentQuerySort(32, block=16),
    stages.Shuffle(),
)


def in_a_window(q: Tensor, k: Tensor, v: Tensor, window: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Hugging Face's rule over all pairs: `q_idx - window < kv_idx <= q_idx`."""
    query = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    pairs = (key > query - window) & (key <= query)
    return masked_attention(q.to(dtype), k.to(dtype), v.to(dtype), pairs, SCALE)


@pytest.mark.parametrize("window", [1, 16, pytest.param(7, marks=pytest.mark.slow), 33])
@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[1], pytest.param(ORDERS[3], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("executor", "D"), [(PORTABLE, 16), pytest.param(bs.FlexExecutor(), 32, marks=[pytest.mark.slow, needs_flex])]
)
def test_the_law_for_compiled_kernels(executor: Any, D: int, order: Any, window: int, device: str) -> None:
    q, k, v = make_qkv(N=83, Hq=2, Hkv=1, D=D, dtype=torch.float32, device=device)
    pipeline = bs.Pipeline(order, bs.NoScorer(16), SomeRows(), executor)
    for start in (0, 37):
        trace = pipeline.trace(q[:, :, start:], k, v, scale=SCALE, window=window)
        assert_means(trace.output, trace.permutation, trace.mask, SCALE, q[:, :, start:], k, v)


@pytest.mark.slow
@pytest.mark.skipif(not GPU, reason="compiled kernels")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [100, 128, 1024, 4096])
def test_dense_attention_in_a_window_on_a_gpu(window: int, head_dim: int, device: str) -> None:
    for M, N in ((5000, 5000), (777, 5000)):
        q, k, v = make_qkv(N=N, M=M, Hq=4, Hkv=2, D=head_dim, dtype=torch.bfloat16, device=device)
        want, plain = (in_a_window(q, k, v, window, dtype) for dtype in (torch.float64, torch.bfloat16))
        assert_within_budget(dense_attention(q, k, v, bs.AttentionSpec(scale=SCALE, window=window)), want, plain)
        for executor, block in ((bs.TritonExecutor(), 128), (bs.AutoExecutor(dense_below=0), 64)):
            out = all_of_it(executor, block)(q, k, v, scale=SCALE, window=window)
            assert_within_budget(out, want, plain)


@pytest.mark.slow
@pytest.mark.skipif(not GPU, reason="compiled kernels")
@pytest.mark.parametrize("name", [name for name in every_preset if name != "s2o"])
def test_presets_in_a_window_on_a_gpu(name: str, device: str) -> None:
    """The kernels choose blocks within the window alone, and the output is attention over them."""
    q, k, v = make_qkv(N=3000, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, device=device)
    executor: Any = bs.TritonExecutor()
    pipeline = attrs.evolve(every_preset[name](), executor=executor)
    trace = pipeline.trace(q, k, v, scale=SCALE, window=1000)
    grid = trace.mask.grid
    assert not bool((trace.mask.keep & ~grid.visible).any())
    assert bool((trace.mask.keep | ~grid.diagonal).all())
    want = bs.ReferenceExecutor()(q, k, v, trace.mask, asked(trace.mask, SCALE)).out
    torch.testing.assert_close(trace.output.out, want, rtol=2e-2, atol=2e-2)


def test_a_window_that_hides_nothing_is_none() -> None:
    q, k, v = make_qkv(N=100, D=16)
    pipeline = bs.mean_pooling(0.5, block=16)
    assert pipeline.trace(q, k, v, window=100).mask.grid.window is None
    assert torch.equal(pipeline(q, k, v, window=100), pipeline(q, k, v))
    assert pipeline.trace(q, k, v, window=99).mask.grid.window == 99


@pytest.mark.parametrize("scorer", stages.SCORERS, ids=repr)
def test_scorers_look_only_at_what_is_seen(scorer: bs.Scorer[Any, Any]) -> None:
    """Blocks outside hold no mass and are not forced; a row of a BlockMass spreads what it has inside."""
    window = 50
    q, k, _ = make_qkv(N=200, Hq=4, Hkv=2, D=16, dtype=torch.float32)
    for order in (bs.Identity(), bs.SegmentKeySort(64, last_q=16)):
        for start in (0, 37):
            given = q[:, :, start:]
            permutation = order(given, k, bs.AttentionSpec(scale=SCALE))
            scores = scorer(given, k, permutation, bs.AttentionSpec(scale=SCALE, window=window))
            grid = scores.grid
            assert grid.window == window
            hidden = ~grid.visible.expand(scores.values.shape)
            if isinstance(scores, bs.BlockMass):
                assert not bool(scores.values[hidden].any())
            if scores.forced is not None:
                assert not bool((scores.forced & ~grid.visible).any())


@pytest.mark.parametrize("scorer", stages.SCORERS, ids=repr)
def test_cells_are_counted_by_their_places_as_by_their_positions(scorer: bs.Scorer[Any, Any]) -> None:
    """Tokens in order have the scores of an index map that leaves them in order."""
    q, k, _ = make_qkv(B=1, N=170, Hq=2, Hkv=1, D=16, dtype=torch.float64)
    in_order = torch.arange(170, dtype=torch.int32).view(1, 1, 1, -1)
    for window in (1, 2, 8, 9, 33, 100):
        one, other = (
            scorer(q, k, permutation, bs.AttentionSpec(scale=SCALE, window=window))
            for permutation in (bs.GlobalPermutation(), bs.GlobalPermutation(in_order))
        )
        torch.testing.assert_close(one.values, other.values)
        assert (one.forced is None) == (other.forced is None)
        assert one.forced is None or torch.equal(one.forced, other.forced)


@pytest.mark.parametrize("scorer", [x for x in stages.SCORERS if not isinstance(x, stages.PROBES)], ids=repr)
def test_tokens_before_the_window_change_nothing(scorer: bs.Scorer[Any, Any]) -> None:
    """Neither scores nor choices of rows whose window begins at a block behind them; a bad key stays out."""
    window, t = 49, 96  # rows from 144 on see keys from 96 on, which is the start of blocks of 16 and of 32
    q, k, v = make_qkv(N=224, Hq=4, Hkv=2, D=16, dtype=torch.float32)
    other_k, other_v = (torch.cat((x[:, :, :t].flip(2) * 3, x[:, :, t:]), dim=2) for x in (k, v))
    other_v[:, :, 5] = float("inf")
    pipeline = bs.Pipeline(bs.Identity(), scorer, bs.TopK(2), bs.CpuExecutor())
    before, after = (pipeline.trace(q, *kv, scale=SCALE, window=window) for kv in ((k, v), (other_k, other_v)))
    rows = slice(-(-144 // before.mask.grid.q_block), None)
    one, two = (x.scores.values[:, :, rows].where(x.mask.grid.visible[:, :, rows], 0.0) for x in (before, after))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    queries = slice(rows.start * before.mask.grid.q_block, None)
    if not (isinstance(scorer, bs.SimilarityGatedScorer) or torch.equal(one, two)):
        return  # rounding may choose otherwise
    torch.testing.assert_close(before.output.out[:, :, queries], after.output.out[:, :, queries])


def test_budgets_are_of_what_is_seen() -> None:
    """A share is one of visible blocks, the rescue rules add none outside, and causal mass does not dilute."""
    q, k, v = make_qkv(N=320, D=16, dtype=torch.float32)
    k[:, :, :16] = 4 * q.mean((0, 1, 2))  # a sink that would take the whole budget
    for selector in (bs.TopCdf(0.9), bs.TopK(2), bs.TopK(share=0.5), bs.Sink(16) | bs.Band(200), bs.Stride(2)):
        pipeline: Any = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), selector, bs.ReferenceExecutor())
        trace = pipeline.trace(q, k, v, window=64)
        grid, keep = trace.mask.grid, trace.mask.keep
        assert not bool((keep & ~grid.visible).any())
        assert bool((keep | ~grid.diagonal).all())
        assert float(trace.density().max()) <= 1
        if isinstance(selector, bs.TopCdf):
            mass = (trace.scores.values * keep).sum(-1)
            torch.testing.assert_close(trace.scores.values.sum(-1), torch.ones_like(mass))
            assert float(mass.min()) > 0.9 - 1e-5


@pytest.mark.parametrize("name", [name for name in every_preset if name != "s2o"])
def test_every_preset(name: str) -> None:
    q, k, v = make_qkv(N=700, Hq=4, Hkv=2, D=16, dtype=torch.float32)
    executor: Any = bs.ReferenceExecutor()
    trace = attrs.evolve(every_preset[name](), executor=executor).trace(q, k, v, scale=SCALE, window=300)
    assert trace.mask.grid.window == 300
    assert_means(trace.output, trace.permutation, trace.mask, SCALE, q, k, v)
    assert float(trace.density().max()) <= 1.5


def test_a_window_makes_dense_work_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of M queries with the keys of one window; an executor that is asked knows it."""
    q, k, v = make_qkv(N=150, Hq=4, Hkv=2, D=16)
    seen = []

    def dense_because(_: object, q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec) -> str:
        seen.append((q.shape[2], k.shape[2], spec))
        return "little work"

    monkeypatch.setattr(bs.CpuExecutor, "dense_because", dense_because)
    dense = all_of_it(bs.CpuExecutor()).trace(q, k, v, scale=SCALE, window=40)
    assert torch.equal(dense.density(), torch.ones(1, 4, dtype=torch.float64))
    spec = bs.AttentionSpec(scale=SCALE, window=40)
    assert seen == [(150, 150, spec)]
    assert dense_operations(q, k, v, spec) == 2 * 4 * 150 * 40 * (16 + 16)


class Forgetful(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """A scorer that makes a grid without the window of the call."""

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockScores:
        grid = bs.Grid.of(q, k, permutation, attrs.evolve(spec, window=None), q_block=64, k_block=64)
        return bs.BlockScores(torch.zeros(*q.shape[:2], grid.rows, grid.cols), grid)


def test_what_knows_no_window_says_so() -> None:
    q, k, v = make_qkv(N=100, D=64, dtype=torch.float16)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(64), bs.Ranked(bs.Everything()), bs.ReferenceExecutor())
    executors: tuple[Any, ...] = PLAIN
    for executor in executors:
        no_window = "it knows no sliding window, and this call has one of 40 tokens"
        with pytest.raises(ValueError, match=no_window) as refused:
            attrs.evolve(everything, executor=executor)(q, k, v, window=40)
        assert "smaller" not in str(refused.value)  # blocks, say, which are no way out
    message = r"made with window=None, and the call has window=40. Pass the spec of the"
    with pytest.raises(ValueError, match=message):
        attrs.evolve(everything, scorer=Forgetful())(q, k, v, window=40)
    for call in (everything, everything.trace, everything.with_lse):
        with pytest.raises(ValueError, match=r"a sliding window is causal, .* Call with causal=True"):
            call(q, k, v, causal=False, window=40)

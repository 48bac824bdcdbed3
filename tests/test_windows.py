"""Sliding windows: one meaning for every executor, scores of what is seen alone, and plain refusals."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.execute.auto import dense_operations
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.testing import assert_within_budget, every_preset, make_qkv
from tests import stages
from tests.machine import GPU
from tests.meaning import assert_means
from tests.specs import asked, grid_of
from tests.test_logits import CHANGES, SomeRows, all_of_it
from tests.test_logits import written_out as with_logits

SCALE = 0.25
WINDOWS = (1, 7, 16, 33, 64, 199)
ORDERS: tuple[bs.Permuter[Any], ...] = (
    bs.Identity(),
    bs.SegmentKeySort(64, last_q=16),
    bs.SegmentQuerySort(32, block=16),
    stages.Shuffle(),
)
each_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
PORTABLE = bs.TritonExecutor(bs.TritonTiles(16, 16, num_warps=4, num_stages=2))


def some_of_it(executor: bs.Executor[Any, Any], order: bs.Permuter[Any]) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(order, bs.NoScorer(16), SomeRows(), executor)


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Hugging Face's rule over all pairs: `q_idx - window < kv_idx <= q_idx`."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    query = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    logits = (q @ k.mT * SCALE).masked_fill(~((key > query - window) & (key <= query)), float("-inf"))
    return logits.softmax(-1) @ v


@each_order
@pytest.mark.parametrize("start", [0, 37, 199])
@pytest.mark.parametrize("executor", [bs.ReferenceExecutor(), bs.CpuExecutor()], ids=lambda x: type(x).__name__)
def test_the_law(executor: Any, start: int, order: Any) -> None:
    """A whole prompt, a chunk that starts inside a block, and one query; three query heads on each KV head."""
    q, k, v = make_qkv(N=200, Hq=6, Hkv=2, D=16, dtype=torch.float32)
    for window in WINDOWS:
        trace = some_of_it(executor, order).trace(q[:, :, start:], k, v, scale=SCALE, window=window)
        assert trace.mask.grid.window == window
        assert_means(trace.output, trace.permutation, trace.mask, SCALE, q[:, :, start:], k, v)


@pytest.mark.parametrize("window", [1, 16, pytest.param(7, marks=pytest.mark.slow), 33])
@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[1], pytest.param(ORDERS[3], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("executor", "D"), [(PORTABLE, 16), pytest.param(bs.FlexExecutor(), 32, marks=pytest.mark.slow)]
)
def test_the_law_for_compiled_kernels(executor: Any, D: int, order: Any, window: int, device: str) -> None:
    q, k, v = make_qkv(N=83, Hq=2, Hkv=1, D=D, dtype=torch.float32, device=device)
    for start in (0, 37):
        trace = some_of_it(executor, order).trace(q[:, :, start:], k, v, scale=SCALE, window=window)
        assert_means(trace.output, trace.permutation, trace.mask, SCALE, q[:, :, start:], k, v)


@pytest.mark.slow
@pytest.mark.skipif(not GPU, reason="compiled kernels")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [100, 128, 1024, 4096])
def test_dense_attention_in_a_window_on_a_gpu(window: int, head_dim: int, device: str) -> None:
    for M, N in ((5000, 5000), (777, 5000)):
        q, k, v = make_qkv(N=N, M=M, Hq=4, Hkv=2, D=head_dim, dtype=torch.bfloat16, device=device)
        want, plain = (written_out(q, k, v, window, dtype) for dtype in (torch.float64, torch.bfloat16))
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


@pytest.mark.parametrize("executor", [bs.ReferenceExecutor(), bs.CpuExecutor(), bs.AutoExecutor()])
def test_the_dense_limit(executor: Any) -> None:
    q, k, v = make_qkv(N=150, Hq=4, Hkv=2, D=16, dtype=torch.float64)
    for window in (*WINDOWS, 150, 10**9):
        for start in (0, 101):
            trace = all_of_it(executor).trace(q[:, :, start:], k, v, scale=SCALE, window=window)
            want = written_out(q[:, :, start:], k, v, window)
            assert float((trace.output.out - want).abs().max()) < 1e-13
            # It visits what dense attention within the window visits, and all of its mass.
            assert torch.equal(trace.density(), torch.ones(2, 4, dtype=torch.float64)[:1])
            assert float((trace.covered_mass() - 1).abs().max()) < 1e-12
            assert float(trace.error().max()) < 1e-12


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
    q, k, v = make_qkv(N=200, Hq=4, Hkv=2, D=16, dtype=torch.float32)
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
            mask = bs.Everything()(scores)
            assert_means(
                bs.CpuExecutor()(given, k, v, mask, asked(mask, SCALE)), permutation, mask, SCALE, given, k, v
            )


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


def test_packed_and_padded_prompts() -> None:
    lengths = (40, 7, 130)
    q, k, v = make_qkv(N=sum(lengths), Hq=4, Hkv=2, D=16, dtype=torch.float32)
    pipeline = bs.mean_pooling(0.6, block=16, executor=bs.CpuExecutor())
    packed = pipeline(q, k, v, window=30, sequences=bs.Sequences.packed(lengths))
    alone = [
        pipeline(*part, window=30) for part in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    ]
    assert torch.equal(packed, torch.cat(alone, dim=2))
    everything = all_of_it(bs.CpuExecutor())(
        q, k, v, scale=SCALE, window=30, sequences=bs.Sequences.packed(lengths)
    )
    own = [written_out(a, b, c, 30) for a, b, c in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)]
    torch.testing.assert_close(everything.double(), torch.cat(own, dim=2), rtol=1e-5, atol=1e-5)
    mask = torch.ones(1, 177, dtype=torch.int64)
    mask[:, :20] = 0
    left = all_of_it(bs.CpuExecutor())(q, k, v, scale=SCALE, window=30, sequences=bs.Sequences.padded(mask))
    whole = all_of_it(bs.CpuExecutor())(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], scale=SCALE, window=30)
    assert torch.equal(left[:, :, 20:], whole)


def test_chunk_by_chunk() -> None:
    q, k, v = make_qkv(N=200, Hq=4, Hkv=2, D=16, dtype=torch.float64)
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(0.6), bs.CpuExecutor())
    whole, done = pipeline(q, k, v, window=50), 0
    for step in (48, 16, 80, 56):
        so_far = slice(done + step)
        chunk = pipeline(q[:, :, done : done + step], k[:, :, so_far], v[:, :, so_far], window=50)
        torch.testing.assert_close(chunk, whole[:, :, done : done + step])
        done += step


def test_dense_attention_has_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an executor would have the pipeline attend densely, and in dense heads."""
    q, k, v = make_qkv(N=150, Hq=4, Hkv=2, D=16, dtype=torch.float64)
    want = written_out(q, k, v, 40)
    out = dense_attention(q, k, v, bs.AttentionSpec(scale=SCALE, window=40))
    assert float((out - want).abs().max()) < 1e-13
    groups = bs.HeadGroups({(1,): None, (0,): all_of_it(bs.CpuExecutor())})
    assert float((groups(q, k, v, scale=SCALE, window=40) - want).abs().max()) < 1e-13
    trace = groups.trace(q, k, v, scale=SCALE, window=40)
    assert float((trace.output.out - want).abs().max()) < 1e-13
    seen = []

    def dense_because(_: object, q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec) -> str:
        seen.append((q.shape[2], k.shape[2], spec))
        return "little work"

    monkeypatch.setattr(bs.CpuExecutor, "dense_because", dense_because)
    pipeline = all_of_it(bs.CpuExecutor())
    assert float((pipeline(q, k, v, scale=SCALE, window=40) - want).abs().max()) < 1e-13
    dense = pipeline.trace(q, k, v, scale=SCALE, window=40)
    assert dense.dense_because == "little work"
    assert torch.equal(dense.density(), torch.ones(1, 4, dtype=torch.float64))
    spec = bs.AttentionSpec(scale=SCALE, window=40)
    assert seen == [(150, 150, spec)] * 2
    # As much work as M queries have with the keys of one window.
    assert dense_operations(q, k, v, spec) == 2 * 4 * 150 * 40 * (16 + 16)


@pytest.mark.parametrize("change", CHANGES, ids=("softcap", "sinks", "both"))
def test_softcap_and_sinks_in_a_window(change: dict[str, Any]) -> None:
    q, k, v = make_qkv(N=120, D=16, dtype=torch.float64)
    for executor in (bs.ReferenceExecutor(), bs.CpuExecutor()):
        for order in ORDERS[:2]:
            trace = some_of_it(executor, order).trace(q[:, :, 11:] * 4, k, v, window=33, **change)
            out, lse = with_logits(trace, torch.float64)
            assert trace.output.lse is not None
            torch.testing.assert_close(trace.output.out, out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(trace.output.lse, lse, rtol=1e-12, atol=1e-12)


class Forgetful(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """A scorer that makes a grid without the window of the call."""

    def __call__(
        self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec
    ) -> bs.BlockScores:
        grid = bs.Grid.of(q, k, permutation, attrs.evolve(spec, window=None), q_block=64, k_block=64)
        return bs.BlockScores(torch.zeros(*q.shape[:2], grid.rows, grid.cols), grid)


def test_what_knows_no_window_says_so() -> None:
    q, k, v = make_qkv(N=100, D=64, dtype=torch.float16)
    everything = bs.Pipeline(bs.Identity(), bs.NoScorer(64), bs.Ranked(bs.Everything()), bs.ReferenceExecutor())
    executors: tuple[Any, ...] = (
        bs.GatherExecutor(),
        bs.Int8Executor(fp8_pv=False),
        bs.FlashAttention4Executor(),
        bs.CudnnExecutor(),
    )
    for executor in executors:
        no_window = "it knows no sliding window, and this call has one of 40 tokens"
        with pytest.raises(ValueError, match=no_window) as refused:
            attrs.evolve(everything, executor=executor)(q, k, v, window=40)
        assert "smaller" not in str(refused.value)  # blocks, say, which are no way out
    with pytest.raises(
        ValueError, match=r"made with window=None, and the call has window=40. Pass the spec of the"
    ):
        attrs.evolve(everything, scorer=Forgetful())(q, k, v, window=40)
    for call in (everything, everything.trace, everything.with_lse):
        with pytest.raises(ValueError, match=r"a sliding window is causal, .* Call with causal=True"):
            call(q, k, v, causal=False, window=40)


def test_masks_of_other_windows_do_not_mix() -> None:
    q, k, _ = make_qkv(N=100, D=16)
    one, other = (bs.Band(8).on(grid_of(q, k, 16, window=window)) for window in (40, None))
    with pytest.raises(ValueError, match="masks must share a grid"):
        one | other

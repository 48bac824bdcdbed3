"""Blocks that are not kept, by their means: against a sum over keys and means, query by query, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.distributed.ranks import ShardedCall
from blocksparse.distributed.scheme import attend_whole
from blocksparse.testing import assert_within_budget, make_qkv
from tests import stages
from tests.meaning import assert_blind_to_later
from tests.specs import asked, grid_of, not_none

REFERENCE = bs.MeanCorrectionExecutor(bs.ReferenceExecutor())


def by_query(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, spec: bs.AttentionSpec) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, from the pairs that the mask means and the blocks that it drops."""
    grid, out, lse = mask.grid, torch.zeros(*q.shape[:3], v.shape[3]).to(q), torch.zeros(q.shape[:3]).to(q)
    for row in range(grid.rows):
        pairs, slots = mask.pairs(row), mask.slots(row)
        queries = mask.queries(row)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                keys, values = (x[b, h // (q.shape[1] // k.shape[1])] for x in (k, v))
                own = [int(i) + (grid.k_len - grid.q_len if grid.causal else 0) for i in queries[b, h]]
                for i, query in enumerate(queries[b, h].tolist()):
                    kept = pairs[b, h, i]
                    terms, worth = [keys[kept] @ q[b, h, query] * spec.scale], [values[kept]]
                    for col in range(grid.cols):
                        tokens = slots[b, h, col][slots[b, h, col] >= 0].long()
                        seen = all(bool(grid.is_visible(torch.tensor(at), tokens).all()) for at in own)
                        if not bool(mask.per_query_head()[b, h, row, col]) and len(tokens) and seen:
                            mean = keys[tokens].mean(0)
                            terms.append((mean @ q[b, h, query] * spec.scale).expand(len(tokens)))
                            worth.append(values[tokens].mean(0).expand(len(tokens), -1))
                    logits = torch.cat(terms)
                    lse[b, h, query] = logits.logsumexp(0)
                    if len(logits):
                        out[b, h, query] = logits.softmax(0) @ torch.cat(worth)
    return out, lse


ORDERS: list[Any] = [bs.Identity(), stages.Shuffle(), bs.SegmentKeySort(32, last_q=8)]


@pytest.mark.parametrize("call", [{}, {"causal": False}, {"window": 50}], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=stages.name)
@pytest.mark.parametrize("M", [41, pytest.param(75, marks=pytest.mark.slow)])
def test_it_is_the_sum_over_keys_and_means(order: bs.Permuter[Any], call: dict[str, Any], M: int) -> None:
    q, k, v = make_qkv(B=1, N=75, M=M, Hq=2, Hkv=1, D=8, dtype=torch.float64)
    pipeline = bs.Pipeline(order, stages.AnyOrder(8), bs.TopK(2), REFERENCE)
    trace = pipeline.trace(q, k, v, **call)
    out, lse = by_query(q, k, v, trace.mask, trace.spec)
    torch.testing.assert_close(trace.output.out, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(not_none(trace.output.lse).double(), lse, rtol=0, atol=1e-12)
    assert trace.visited is trace.mask
    exact = bs.ReferenceExecutor()(q, k, v, trace.mask, trace.spec)
    # Where tokens are shuffled, hardly a block lies wholly in the past of a row.
    assert torch.allclose(exact.out, out) == (isinstance(order, stages.Shuffle) and call != {"causal": False})


def test_executors_and_precisions(device: str) -> None:
    """Each executor that gives an lse, in budget of what float64 gives; a row with nothing kept has its means."""
    q, k, v = make_qkv(N=200, Hq=4, Hkv=2, D=32, device=device)
    grid = grid_of(q, k, 16)
    keep = grid.visible.expand(1, 4, -1, -1) & (torch.rand(1, 4, grid.rows, grid.cols) < 0.3).to(device)
    keep = keep & (torch.arange(grid.rows, device=device) != 5)[:, None]
    mask = bs.BlockMask(keep, grid)
    spec = asked(mask, 0.2)
    want = REFERENCE(q.double(), k.double(), v.double(), mask, spec)
    plain = REFERENCE(q, k, v, mask, spec)
    inner: list[bs.Executor[Any, Any]] = [bs.ReferenceExecutor(), bs.AutoExecutor()]
    inner += [bs.CpuExecutor()] if device == "cpu" else [bs.TritonExecutor()]
    for executor in inner:
        into = torch.empty_like(plain.out)
        got = bs.MeanCorrectionExecutor(executor)(q, k, v, mask, spec, into)
        assert got.out is into
        assert_within_budget(got.out, want.out, plain.out)
    assert bool(not_none(want.lse)[:, :, 80:96].isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("inner", [bs.ReferenceExecutor(), bs.CpuExecutor()], ids=repr)
def test_later_keys_change_nothing_nor_do_numbers_that_are_not_finite(
    inner: bs.Executor[Any, Any], bad: float
) -> None:
    """A query has the bits that it has without them, unless it sees them; then they show, kept or not."""
    q, k, v = make_qkv(N=100, Hq=2, Hkv=1, D=16)
    pipeline = bs.mean_pooling(0.3, block=16, executor=bs.MeanCorrectionExecutor(inner))
    choice = pipeline.choose(q, k)
    assert_blind_to_later(pipeline.executor, q, k, v, choice.mask, choice.spec)
    before = pipeline.attend(q, k, v, choice).out
    for x in (k, v):
        x[:, :, 32:48] = bad
        after = pipeline.attend(q, k, v, choice).out
        assert torch.equal(after[:, :, :32], before[:, :, :32])
        if bad != 1e30:
            assert not bool(after[:, :, 48:].isfinite().any())
        before = after


def test_a_layers_sinks_and_softcap() -> None:
    q, k, v = make_qkv(B=1, N=60, Hq=2, Hkv=1, D=8, dtype=torch.float64)
    pipeline = bs.Pipeline(bs.Identity(), stages.AnyOrder(16), bs.TopK(1), REFERENCE)
    trace = pipeline.trace(q, k, v, sinks=1.5)
    out, lse = by_query(q, k, v, trace.mask, trace.spec)
    with_sink = torch.logaddexp(lse, torch.tensor(1.5, dtype=torch.float64))
    torch.testing.assert_close(trace.output.out, out * (lse - with_sink).exp().unsqueeze(-1), rtol=0, atol=1e-12)
    flat = pipeline.trace(q, k, v, softcap=1e-9).output.out  # all logits are 0, so that keys count alike
    for i in range(16, 60):
        torch.testing.assert_close(flat[0, 0, i], v[0, 0, : i + 1].mean(0), rtol=0, atol=1e-8)


def test_what_gives_no_lse_is_refused() -> None:
    class NoLse(stages.ByReference):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *_: Any, **more: Any) -> Any:
            return bs.AttentionOutput(v, None)

    with pytest.raises(ValueError, match="joins outputs by their lse, and NoLse gives none"):
        bs.mean_pooling(block=16, executor=bs.MeanCorrectionExecutor(NoLse()))(*make_qkv(N=40, Hq=2, Hkv=2, D=16))


def test_sol_attn_with_its_mean_correction() -> None:
    q, k, v = make_qkv(N=200, Hq=2, Hkv=2, D=16, dtype=torch.float64)
    whole = bs.sol_attn(1.0, block=16, mean_correction=True, executor=bs.ReferenceExecutor())
    assert whole.executor == REFERENCE
    trace = whole.trace(q, k, v, causal=False)
    alone = bs.sol_attn(1.0, block=16, executor=bs.ReferenceExecutor()).trace(q, k, v, causal=False)
    assert torch.equal(trace.mask.keep, alone.mask.keep)
    assert bool((trace.error() < alone.error()).all())


def test_a_rank_says_what_it_visited() -> None:
    """One of several GPUs that has the whole prompt, and gives its lse to others."""
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=200, D=16)
    means = bs.mean_pooling(0.4, block=32, executor=bs.MeanCorrectionExecutor(bs.ReferenceExecutor()))
    call = ShardedCall(bs.AttentionSpec(scale=0.25), with_lse=True, Hq=4, Hkv=2)
    output, expected = attend_whole(means, q, k, lambda: v, call, dense=False), means.trace(q, k, v).output
    assert torch.equal(not_none(output.exact_lse), not_none(expected.exact_lse))
    assert output.visited is not None


def test_a_layer_of_several_pipelines_says_what_each_visited() -> None:
    q, k, v = make_qkv(B=1, Hq=4, Hkv=2, N=200, D=16)
    means = bs.mean_pooling(0.4, block=32, executor=bs.MeanCorrectionExecutor(bs.ReferenceExecutor()))
    plain = bs.mean_pooling(0.4, block=32, executor=bs.ReferenceExecutor())
    output = bs.HeadGroups({(0,): means, (1,): plain}).trace(q, k, v).output
    expected = not_none(plain.trace(q, k, v).output.lse)
    torch.testing.assert_close(not_none(output.visited_lse), expected)
    assert not not_none(output.lse)[:, :2].allclose(expected[:, :2])
    assert bs.HeadGroups({(0,): plain, (1,): plain}).trace(q, k, v).output.exact_lse is None

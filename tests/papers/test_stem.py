"""Stem against a reading of its definition (arXiv 2603.06274, as AngelSlim's code has it)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.papers.readings import Small, check, small, some_cases, top
from torch import Tensor

import blocksparse as bs
from blocksparse.distributed.ranks import ShardedCall
from blocksparse.distributed.scheme import attend_whole
from blocksparse.inputs import checked
from blocksparse.layers.reused_mask import MaskCache, ReusedMask
from blocksparse.testing import make_qkv

STRIDE, K = 4, 3


def z_scores(v: Tensor, lengths: tuple[float, float] | None) -> list[Tensor]:
    """Of each cell, how far its longest value lies above the mean, `[B, Hkv]` each."""
    N = v.shape[2]
    logs = [(v[:, :, i : i + STRIDE].norm(dim=3).amax(2) + 1e-6).log() for i in range(0, N, STRIDE)]
    if lengths is None:
        whole = torch.stack(logs[: max(N // STRIDE, 1)])
        mean, deviation = whole.mean(0), whole.std(0) if len(whole) > 1 else torch.zeros(())
    else:
        mean, deviation = (torch.tensor(x) for x in lengths)
    return [((log - mean) / (deviation + 1e-6)).clamp_min(0) for log in logs]


def reading(case: Small, decay: float, weight: float, lengths: tuple[float, float] | None) -> Tensor:
    """Pair by pair: logits on antidiagonals of cells, the bonus of cells, and the best blocks of each row."""
    above, group = z_scores(case.v, lengths), case.q.shape[1] // case.k.shape[1]
    rows = []
    for row in case.rows:
        scores = []
        for col in case.cols:
            logit: Any = 0.0
            for r in range(STRIDE):
                queries = [i for i in row if i % STRIDE == STRIDE - 1 - r]
                keys = [j for j in col if j % STRIDE == r]
                pairs = [case.of_row(row)[:, :, i - row.start] * case.keys[:, :, j] for i in queries for j in keys]
                logit = logit + (torch.stack(pairs).sum(3).mean(0) if pairs else 0.0) * case.scale / STRIDE
            cells = sorted({j // STRIDE for j in col})
            bonus = torch.stack([above[cell] for cell in cells]).mean(0).repeat_interleave(group, 1)
            scores.append(logit + weight * bonus)
        rows.append(torch.stack(scores, 2))
    scored = torch.stack(rows, 2).masked_fill(~case.visible, float("-inf"))
    n = len(case.cols)
    falling = torch.linspace(K, K * decay, max(n - K, 1), dtype=torch.float64).floor().clamp_min(1).tolist()
    number = [K if row.start // 8 < K else falling[row.start // 8 - K] for row in case.rows]
    near = case.among(lambda row, col: 0 <= row.start // 8 - col.start // 8 < 2 or col.start < 8)
    return (top(scored, torch.tensor(number).unsqueeze(1)) | near) & case.visible


@some_cases
@pytest.mark.parametrize("lengths", [None, (1.0, 0.3)], ids=str)
def test_masks_and_outputs(cases: range, lengths: tuple[float, float] | None) -> None:
    pipeline = bs.stem(
        0.4, k=K, weight=0.5, lengths=lengths, stride=STRIDE, block=8, sink=8, window=16,
        executor=bs.ReferenceExecutor(),
    )  # fmt: skip
    check(pipeline, partial(reading, decay=0.4, weight=0.5, lengths=lengths), louder(cases))


def test_chunks_choose_as_the_whole_where_nothing_is_measured() -> None:
    pipeline = bs.stem(
        1.0, k=K, weight=0.5, lengths=(1.0, 0.3), stride=STRIDE, block=8, sink=8, window=8,
        executor=bs.ReferenceExecutor(),
    )  # fmt: skip
    q, k, v = make_qkv(N=90, Hq=4, Hkv=2, D=16, dtype=torch.float64)
    whole = pipeline.choose(q, k, v).mask.keep
    for start, end in ((8, 90), (40, 80), (72, 90)):
        chunk = pipeline.choose(q[:, :, start:end], k[:, :, :end], v[:, :, :end]).mask.keep
        assert torch.equal(chunk, whole[:, :, start // 8 : -(-end // 8), : chunk.shape[3]])


def louder(cases: range) -> Any:
    """Small calls in which some values are long."""
    for seed in cases:
        case = small(seed, causal=True)
        loud = torch.rand(case.v.shape[:3], generator=torch.Generator().manual_seed(seed)) < 0.1
        case.v.mul_(torch.where(loud, 4.0, 1.0).unsqueeze(3))
        yield case


@pytest.mark.parametrize(("n", "first"), [(40, 40), (100, 50), (200, 50)])
def test_how_many_blocks_a_row_keeps(n: int, first: int) -> None:
    """The released rule: all of fewer than 56, `.2 n + 30`, `.1 n + 30`; then evenly down to seven tenths."""
    q, k, v = make_qkv(N=4 * n, Hq=1, Hkv=1, D=4)
    pipeline = bs.Pipeline(
        bs.Identity(), bs.OutputAwareScorer(4, block=4), bs.DecayingTopK(), bs.ReferenceExecutor()
    )
    kept = pipeline.choose(q, k, v).mask.keep[0, 0].sum(1)
    for i in range(n):
        falling = first - 0.3 * first * (i - first) / max(n - first - 1, 1)
        want = i + 1 if i < first else falling
        # One more where the diagonal is not among the best.
        assert int(want + 1e-9) <= kept[i] <= int(want + 1e-9) + 1


def test_long_values_are_kept_and_their_unit_does_not_matter() -> None:
    q, k, v = make_qkv(N=512, Hq=2, Hkv=1, D=16)
    pipeline = bs.stem(k=4, weight=50.0, block=32, sink=32, window=32, executor=bs.ReferenceExecutor())
    v[:, :, 64:96] *= 9
    mask = pipeline.choose(q, k, v).mask.keep
    assert bool(mask[:, :, 2:, 2].all())
    assert torch.equal(pipeline.choose(q, k, v * 2).mask.keep, mask)
    without = bs.stem(k=4, weight=0.0, block=32, sink=32, window=32, executor=bs.ReferenceExecutor())
    assert not bool(without.choose(q, k, v).mask.keep[:, :, 2:, 2].all())


def test_who_passes_values_and_who_refuses() -> None:
    q, k, v = make_qkv(N=200, Hq=2, Hkv=1, D=16)
    pipeline = bs.stem(k=2, block=16, sink=16, window=16, executor=bs.ReferenceExecutor())
    want = pipeline(q, k, v)
    assert torch.equal(pipeline.trace(q, k, v).output.out, want)
    assert torch.equal(pipeline.with_lse(q, k, v).out, want)
    assert torch.equal(ReusedMask(pipeline, 0, 0, MaskCache(2))(q, k, v), want)
    spec = checked(q, k, v, {})[3]
    call = ShardedCall(spec, with_lse=False, Hq=2, Hkv=1)
    assert torch.equal(attend_whole(pipeline, q, k, lambda: v, call, dense=False).out, want)
    assert torch.equal(bs.HeadGroups({(0,): pipeline})(q, k, v), want)
    with pytest.raises(ValueError, match=r"OutputAwareScorer scores blocks by values.*pipeline.choose\(q, k, v\)"):
        pipeline.choose(q, k)
    pair = bs.ScorerPair(bs.OutputAwareScorer(block=16), bs.MeanPoolScorer(16))
    two = bs.Pipeline(bs.Identity(), pair, bs.SelectorPair(bs.TopK(1), bs.TopK(1)), bs.ReferenceExecutor())
    with pytest.raises(ValueError, match="Inside another scorer it gets none"):
        two(q, k, v)
    with pytest.raises(ValueError, match="remembers nothing of keys"):
        pipeline(q, k, v, history=bs.KeyHistory())
    with pytest.raises(ValueError, match="'v' must"):
        pipeline.choose(q, k, v[:, :, :9])

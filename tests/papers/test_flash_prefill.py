"""FlashPrefill against a reading of its definition (arXiv 2603.06199, as AngelSlim's clean-room code has it)."""

from __future__ import annotations

import torch
from tests.papers.readings import CASES, Small, check, small
from torch import Tensor

import blocksparse as bs

ALPHA = 0.3


def reading(case: Small, *, last: int = 0) -> Tensor:
    """Row by row: sums over queries that see a block's last token of exp(q . mean key), against the greatest."""
    means = case.means()[1]
    kept = []
    for row in case.rows:
        logits = case.scale * case.of_row(row) @ means.mT  # [B, Hq, m, cols]
        counts = torch.tensor([[i >= col[-1] for col in case.cols] for i in row])
        weight = (logits - logits.amax((2, 3), keepdim=True)).exp().where(counts, 0.0)
        score = weight.sum(2)
        kept.append((score >= ALPHA * score.amax(-1, keepdim=True)) & (score > 0))
    end = case.k.shape[2]
    near = case.among(lambda row, col: 0 <= row.start // 8 - col.start // 8 < 2 or col.start < 8)
    dense = case.among(lambda row, _: row.stop > end - last)
    return (torch.stack(kept, 2) | near | dense) & case.visible


def test_masks_outputs_and_chunks() -> None:
    preset = bs.flash_prefill(ALPHA, block=8, sink=8, window=16, last=None, executor=bs.ReferenceExecutor())
    check(preset, reading, (small(i, causal=True) for i in range(CASES)), chunked=True)


def test_the_last_queries_are_dense() -> None:
    pipeline = bs.flash_prefill(ALPHA, block=8, sink=8, window=16, last=11, executor=bs.ReferenceExecutor())
    for seed in range(10):
        case = small(seed, causal=True)
        keep = pipeline.trace(case.q, case.k, case.v).mask.keep
        assert torch.equal(keep, reading(case, last=11))


def test_the_mean_correction_of_its_second_version() -> None:
    pipeline, exact = (bs.flash_prefill(0.95, block=8, mean_correction=x) for x in (True, False))
    assert pipeline.executor == bs.MeanCorrectionExecutor(exact.executor)

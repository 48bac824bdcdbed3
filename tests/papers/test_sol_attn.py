"""Sol-Attn's selection against a reading of its definition (arXiv 2607.24027, as in TensorRT-LLM)."""

from __future__ import annotations

import math

import pytest
import torch
from tests.papers.readings import Small, check, small, some_cases
from torch import Tensor

import blocksparse as bs
from blocksparse.score.pooled import Variance


@some_cases
@pytest.mark.parametrize("variance", ["diagonal", "exact"])
def test_masks_and_outputs(variance: Variance, cases: range) -> None:
    """In logits of base 2: above their mean and some deviations, from moments of the mean keys."""

    def reading(case: Small) -> Tensor:
        queries, keys = case.means()
        S = case.scale * math.log2(math.e)
        logits, mean = S * queries @ keys.mT, S * queries @ keys.mean(2, keepdim=True).mT
        if variance == "diagonal":
            of_keys = keys.square().mean(2) - keys.mean(2).square()
            spread = (queries.square() * of_keys.unsqueeze(2)).sum(-1, keepdim=True)
        else:
            centred = keys - keys.mean(2, keepdim=True)
            covariance = centred.mT @ centred / keys.shape[2]
            spread = ((queries @ covariance) * queries).sum(-1, keepdim=True)
        bound = mean + 0.8 * (S**2 * spread + 1e-6).sqrt()
        near = case.among(lambda row, col: abs(row.start // 8 - col.start // 8) <= 1)
        text = case.among(lambda _, col: col.stop > case.k.shape[2] - 3)
        return (logits > bound) | near | text

    preset = bs.sol_attn(0.8, block=8, variance=variance, text=3, executor=bs.ReferenceExecutor())
    some = cases if variance == "diagonal" else cases[::10]
    check(preset, reading, (small(i, causal=False, most=120) for i in some))


@pytest.mark.parametrize("variance", ["diagonal", "exact"])
def test_causal_rows_ask_for_the_keys_that_they_reach(variance: Variance) -> None:
    pipeline = bs.sol_attn(0.5, block=8, variance=variance, executor=bs.ReferenceExecutor())
    for seed in range(10):
        case = small(seed, causal=True, N=64)
        whole = pipeline.trace(case.q, case.k, case.v).mask.keep
        rows = whole.shape[2]
        for start in range(8 - rows, 8):  # a row alone, with the keys up to its end
            q, end = case.q[:, :, : (start + 1) * 8 - case.offset], (start + 1) * 8
            alone = pipeline.trace(q, case.k[:, :, :end], case.v[:, :, :end]).mask.keep
            assert torch.equal(alone[:, :, -1], whole[:, :, start - 8 + rows, : start + 1])


def test_equal_logits_keep_only_neighbours() -> None:
    x = torch.ones(1, 1, 64, 8)
    keep = bs.sol_attn(0.0, block=8, executor=bs.ReferenceExecutor()).trace(x, x, x, causal=False).mask.keep[0, 0]
    i = torch.arange(8)
    assert torch.equal(keep, (i[:, None] - i).abs() <= 1)

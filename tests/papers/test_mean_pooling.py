"""MeanPooling, the baseline of PBS-Attn, against the authors' code."""

from __future__ import annotations

import pytest
import torch
from tests.papers.golden_cases import assert_same_output, cases, differing, load

import blocksparse as bs

MEAN_POOLING = cases("meanpool")


@pytest.mark.parametrize("name", MEAN_POOLING)
def test_mean_pooling_mask(name: str) -> None:
    case = load(name)
    params = case.params
    pipeline = bs.mean_pooling(
        params["threshold"], block=params["block_size"], as_released=True, executor=bs.ReferenceExecutor()
    )
    trace = pipeline.trace(case.q, case.k, case.v)
    assert differing(trace.mask, case).tolist() == []
    golden = torch.from_numpy(case.arrays["scores"]).float()
    torch.testing.assert_close(trace.scores.values, golden, rtol=1e-3, atol=1e-5)
    if not torch.from_numpy(case.arrays["fragile"]).any():
        assert_same_output(trace.output.out, case)


@pytest.mark.parametrize("name", MEAN_POOLING)
def test_mean_pooling_true_tail_changes_the_last_row_alone(name: str) -> None:
    """By default a short tail block is a mean over its own tokens; the released code divides by the block."""
    case = load(name)
    params = case.params
    executor = bs.ReferenceExecutor()
    pipeline = bs.mean_pooling(params["threshold"], block=params["block_size"], executor=executor)
    keep = pipeline.trace(case.q, case.k, case.v).mask.keep
    golden, fragile = (torch.from_numpy(case.arrays[x]) for x in ("mask", "fragile"))
    whole = case.k.shape[2] // params["block_size"]
    assert not bool(((keep != golden) & ~fragile)[:, :, :whole].any())

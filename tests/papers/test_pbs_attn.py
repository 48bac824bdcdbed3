"""PBS-Attn against the authors' code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.papers.golden_cases import assert_same_output, cases, differing, load
from tests.papers.golden_inputs import Golden

import blocksparse as bs

PBS = cases("pbs")
# pbs_04 has no mask: one segment, dense. pbs_05, float threshold 1.0: rows whose fp32 sum misses 1.0 keep nothing.
DENSE, EMPTIES_ROWS = "pbs_04_n512_d64_fallback", "pbs_05_n2048_d64_thr1"


def pbs(case: Golden, *, as_released: bool) -> bs.Trace[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask]:
    params = case.params
    how: Any = {"as_released": as_released, "executor": bs.ReferenceExecutor()}
    pipeline = bs.pbs_attn(params["threshold"], block=params["block_size"], S=params["segment_size"], **how)
    return pipeline.trace(case.q, case.k, case.v)


@pytest.mark.parametrize("name", [name for name in PBS if name not in (DENSE, EMPTIES_ROWS)])
def test_pbs_attn_mask(name: str) -> None:
    case = load(name)
    trace = pbs(case, as_released=True)
    assert differing(trace.mask, case).tolist() == []
    if not torch.from_numpy(case.arrays["fragile"]).any():
        assert_same_output(trace.output.out, case)


@pytest.mark.parametrize("name", [name for name in PBS if name != DENSE])
def test_pbs_attn_order_and_pooled_scores(name: str) -> None:
    """Equal to the authors' order, but for keys whose importance ties to rounding."""
    case = load(name)
    trace = pbs(case, as_released=True)
    golden = torch.from_numpy(case.arrays["scores"]).float().nan_to_num(0.0)  # rows of the first segment
    torch.testing.assert_close(trace.scores.values, golden, rtol=1e-3, atol=1e-5)
    index = trace.permutation.k_index
    assert index is not None
    ours, theirs = index[:, :, 0].numpy(), case.arrays["perm"]
    S = case.params["segment_size"]
    whole = ours.shape[-1] // S * S
    assert (ours[..., whole:] == theirs[..., whole:]).all()
    key = np.take_along_axis(case.arrays["sort_key"], ours[..., :whole], -1).reshape(*ours.shape[:2], -1, S)
    assert (np.sort(ours[..., :whole].reshape(key.shape), -1) == np.arange(whole).reshape(-1, S)).all()
    assert float((key[..., 1:] / key[..., :-1]).max()) < 1 + 1e-5
    assert float((ours == theirs).mean()) > 0.999


def test_pbs_attn_one_segment_is_dense() -> None:
    case = load(DENSE)
    for as_released in (False, True):
        trace = pbs(case, as_released=as_released)
        assert_same_output(trace.output.out, case)


@pytest.mark.parametrize("name", [name for name in PBS if name not in (DENSE, EMPTIES_ROWS)])
def test_pbs_attn_default_differs_where_it_says(name: str) -> None:
    """The default last_q is causal and its order is shared by a KV head: own segments are kept all the same."""
    case = load(name)
    ours, released = pbs(case, as_released=False), pbs(case, as_released=True)
    own = ours.mask.grid.own_segment(case.params["segment_size"])
    assert bool((own <= ours.mask.keep).all())
    assert float(ours.covered_mass().mean()) > float(released.covered_mass().mean()) - 0.02

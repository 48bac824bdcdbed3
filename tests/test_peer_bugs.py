"""Things that the papers' released codes got wrong, where no stage's own test holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv
from tests.specs import grid_of

PRESETS = pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)


@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 7, 8, 12])
def test_reduction_over_a_group(G: int) -> None:
    """One mask per KV head is what any query head of its group keeps, for groups of any size."""
    q, k, v = make_qkv(B=2, Hq=2 * G, Hkv=2, N=100, D=16)
    alone = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(0.5), bs.ReferenceExecutor())
    shared = bs.Pipeline(
        bs.Identity(), bs.MeanPoolScorer(16), bs.SharedByGroup(bs.TopCdf(0.5)), bs.ReferenceExecutor()
    )
    one, each = shared.trace(q, k, v).mask, alone.trace(q, k, v).mask
    want = torch.stack([each.keep[:, h * G : (h + 1) * G].any(1) for h in range(2)], dim=1)
    assert torch.equal(one.keep, want)
    assert torch.equal(one.per_query_head(), want.repeat_interleave(G, dim=1))


@PRESETS
def test_calls_leave_nothing_behind(preset: Any, device: str) -> None:
    """Neither an earlier call with other sizes nor, on a GPU, another stream changes what a call gives."""
    pipeline = preset(executor=bs.ReferenceExecutor())
    q, k, v = make_qkv(N=300, D=32, device=device)
    first = pipeline(q, k, v)
    pipeline(*make_qkv(B=2, Hq=6, Hkv=3, N=700, D=16, seed=1, device=device))
    preset(executor=bs.ReferenceExecutor())(*make_qkv(N=129, D=64, device=device))
    assert torch.equal(pipeline(q, k, v), first)
    if device == "cuda":
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            beside = pipeline(q, k, v)
        stream.synchronize()
        assert torch.equal(beside, first)


@PRESETS
def test_density_is_the_same_count_everywhere(preset: Any, device: str) -> None:
    """Pairs in visited blocks over the pairs that dense attention visits, a tail by its tokens."""
    q, k, v = make_qkv(N=1000, D=32)
    trace = preset(executor=bs.ReferenceExecutor()).trace(q, k, v)
    grid, keep = trace.visited.grid, trace.visited.per_query_head()
    kept = torch.zeros(keep.shape[:2], dtype=torch.float64)
    dense = 0
    for row in range(grid.rows):
        slots, queries = trace.visited.slots(row), trace.visited.queries(row).shape[-1]
        kept += queries * (keep[:, :, row] * (slots >= 0).sum(-1)).sum(-1)
        row_end = min((row + 1) * grid.q_block, 1000)
        dense += queries * min(-(-row_end // grid.k_block) * grid.k_block, 1000)
    torch.testing.assert_close(trace.density(), kept / dense)
    if isinstance(trace.permutation, bs.GlobalPermutation):
        there = grid_of(q.to(device), k.to(device), grid.q_block, grid.k_block)
        moved = bs.BlockMask(trace.visited.keep.to(device), there)
        assert torch.equal(moved.density().cpu(), trace.visited.density())


@pytest.mark.slow
@PRESETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_covers_the_same_mass(preset: Any, dtype: torch.dtype) -> None:
    """Blocks at the boundary may flip; what they hold together may not."""
    pipeline = preset(executor=bs.ReferenceExecutor())
    q, k, v = make_qkv(N=1000, D=64, dtype=dtype)
    low, full = pipeline.trace(q, k, v), pipeline.trace(q.float(), k.float(), v.float())
    assert float((low.covered_mass() - full.covered_mass()).abs().max()) < 0.02

"""The twenty things that the papers' released codes got wrong, and where each is held here.

Those without a better home are tested below.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import blocksparse as bs
from blocksparse.testing import every_preset, make_qkv

HERE = Path(__file__).parent
PRESETS = pytest.mark.parametrize("preset", every_preset.values(), ids=every_preset)

WHERE = {
    "threshold 1 keeps all and empties no row": "test_laws.py::test_selectors_reach_the_dense_limit",
    "thresholds next to 1": "test_stages.py::test_top_cdf_boundary",
    "a row with nothing eligible has no NaN": (
        "papers/test_sparge.py::test_a_row_without_a_similar_key_block_has_no_nan"
    ),
    "crossing block kept or dropped": "test_stages.py::test_top_cdf_boundary",
    "forced blocks counted or not": (
        "papers/test_xattention.py::test_forced_blocks_are_counted_by_xattention_and_not_by_a_union"
    ),
    "causality by perturbation": "test_laws.py::test_causality_by_perturbation",
    "causality by perturbation in 8 bits": "kernels/attention/test_quantized.py::test_later_tokens_change_no_bit",
    "chunked equals unchunked": "test_laws.py::test_chunked_equals_unchunked",
    "a chunk keeps every query's own key": "papers/test_bfla.py::test_band_covers_the_whole_query_block",
    "padding changes no real block": "test_laws.py::test_padding_and_tail_never_change_a_real_block",
    "aligned lengths and one token either side": "test_laws.py::test_presets_at_awkward_lengths",
    "ties": "test_laws.py::test_ties_and_repeats_choose_alike",
    "reduction over a group": "test_peer_bugs.py::test_reduction_over_a_group",
    "rescue hashes": "papers/test_bfla.py::test_hash_is_uniform_along_every_axis",
    "stride rescue": "papers/test_bfla.py::test_stride_keeps_one_of_eta",
    "early stop and a constant on all logits": "papers/test_s2o.py::test_a_constant_on_all_logits_changes_nothing",
    "early stop and a rising maximum": "papers/test_s2o.py::test_a_rising_maximum_is_no_reason_to_stop",
    "PV skip off is exact": "kernels/attention/test_sparse_attention.py::test_pv_skip_off_is_exact",
    "PV skip and its denominator": (
        "kernels/attention/test_sparse_attention.py::test_pv_skip_leaves_out_what_the_rule_says"
    ),
    "a row with nothing kept": "test_laws.py::test_a_row_with_nothing_kept",
    "streams, graphs, no state between calls": "test_peer_bugs.py::test_calls_leave_nothing_behind",
    "nothing is accepted and ignored": "test_inputs.py::test_arguments",
    "density": "test_peer_bugs.py::test_density_is_the_same_count_everywhere",
    "kernels run with the warps they ask for": "kernels/compile_ahead.py::broken_rules",
    "scores in low precision": "test_peer_bugs.py::test_low_precision_covers_the_same_mass",
    "a diagonal at every offset": "papers/test_flex_prefill.py::test_a_diagonal_at_every_offset_is_covered",
}


@pytest.mark.parametrize(("bug", "where"), WHERE.items(), ids=WHERE)
def test_each_is_held_somewhere(bug: str, where: str) -> None:
    file, name = where.split("::")
    assert re.search(rf"^def {name}\(", (HERE / file).read_text(encoding="utf-8"), re.MULTILINE), bug


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
        there = bs.Grid.of(
            q.to(device),
            k.to(device),
            bs.GlobalPermutation(),
            bs.AttentionSpec(scale=1.0),
            q_block=grid.q_block,
            k_block=grid.k_block,
        )
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

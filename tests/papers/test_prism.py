"""Prism against a reading of its definition (arXiv 2602.08426)."""

from __future__ import annotations

import math

import pytest
import torch
from tests.papers.readings import Small, check, holding, small, some_cases
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import make_qkv

MASS, D = 0.7, 16
FAST = [*range(4), *range(8, 12)]  # channels 0 to 3 turn with 8 to 11
SLOW = [*range(2, 8), *range(10, 16)]


def reading(case: Small, temperature: float | None = None) -> Tensor:
    queries, keys = case.means()
    kept = torch.zeros(1, dtype=torch.bool)
    for band in (FAST, SLOW):
        mine, its = queries[..., band], keys[..., band]
        if temperature is None:
            rms = [x.square().mean((2, 3), keepdim=True).sqrt() for x in (mine, queries, its, keys)]
            t = math.sqrt(len(band) / D) * (rms[0] / rms[1]) * (rms[2] / rms[3])
        else:
            t = torch.tensor(temperature)
        logits = mine @ its.mT / (math.sqrt(len(band)) * t)
        kept = kept | holding(logits.masked_fill(~case.visible, float("-inf")).softmax(-1), MASS)
    own = case.among(lambda row, col: row.start // 8 == col.start // 8 or col.start == 0)
    return (kept | own) & case.visible


@some_cases
def test_masks_and_outputs(cases: range) -> None:
    preset = bs.prism(MASS, block=8, executor=bs.ReferenceExecutor())
    check(preset, reading, (small(i, causal=True, D=D) for i in cases))


def test_a_given_temperature_makes_chunks_choose_as_the_whole() -> None:
    pipeline = bs.prism(MASS, block=8, temperature=0.5, executor=bs.ReferenceExecutor())
    cases = (small(i, causal=True, D=D) for i in range(20))
    check(pipeline, lambda case: reading(case, 0.5), cases, chunked=True)


@pytest.mark.parametrize(("temperature", "most"), [(None, 0.02), (0.5, 0.0)])
def test_how_much_a_choice_depends_on_later_tokens(temperature: float | None, most: float) -> None:
    """With another second half of a prompt, a small share of the first half's blocks are chosen otherwise."""
    (q, k, _), other = (make_qkv(N=4096, Hq=4, Hkv=2, D=128, seed=seed) for seed in (0, 7))
    pipeline = bs.prism(temperature=temperature, executor=bs.ReferenceExecutor())
    changed = [torch.cat((x[:, :, :2048], y[:, :, 2048:]), 2) for x, y in zip((q, k), other, strict=False)]
    before, after = (pipeline.choose(*x).mask for x in ((q, k), changed))
    reach = before.grid.visible[:, :, :16].expand(1, 4, -1, -1)
    share = (before.keep ^ after.keep)[:, :, :16][reach].double().mean()
    assert share <= most
    assert (share > 0) == (temperature is None)


def test_pairs() -> None:
    pair = bs.ScorerPair(bs.MeanLogitScorer(16), bs.MeanPoolScorer(16))
    pipeline = bs.Pipeline(
        bs.Identity(), pair, bs.SelectorPair(bs.MeanStd(0.5), bs.TopCdf(0.5)), bs.ReferenceExecutor()
    )
    case = small(3, causal=True, N=64)
    parts = [
        bs.Pipeline(bs.Identity(), scorer, selector, bs.ReferenceExecutor())
        for scorer, selector in (
            (bs.MeanLogitScorer(16), bs.MeanStd(0.5)),
            (bs.MeanPoolScorer(16), bs.TopCdf(0.5)),
        )
    ]
    first, second = (part.trace(case.q, case.k, case.v).mask.keep for part in parts)
    assert torch.equal(pipeline.trace(case.q, case.k, case.v).mask.keep, first | second)
    rule = bs.SelectorPair(bs.TopCdf(0.5), bs.TopCdf(0.5))
    swapped = bs.Pipeline(bs.Identity(), pair, rule, bs.ReferenceExecutor())  # type: ignore[misc]
    with pytest.raises(TypeError, match="TopCdf needs a BlockMass, and got a BlockLogits"):
        swapped(case.q, case.k, case.v)
    uneven = bs.ScorerPair(bs.MeanPoolScorer(16), bs.MeanPoolScorer(32))
    with pytest.raises(ValueError, match=r"both scorers of 'ScorerPair' must score the same blocks: \(16, 16\)"):
        uneven(case.q, case.k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.1))
    with pytest.raises(ValueError, match="needs pairs of channels, and the head dim is odd: 7"):
        bs.prism(block=8)(case.q[..., :7].float(), case.k[..., :7].float(), case.v.float())

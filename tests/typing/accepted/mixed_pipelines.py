"""Compositions that must type-check, with the type each must have."""

from typing import assert_type

import attrs
import torch

import blocksparse as bs

paper: bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask] = bs.pbs_attn(0.9)
verbatim = bs.Pipeline(bs.SegmentKeySort(S=256), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.TritonExecutor())
assert_type(verbatim, bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask])

# A selector that needs less takes more: TopK needs scores of any kind.
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.TopK(4), bs.FlexExecutor())
bs.Pipeline(bs.SegmentKeySort(), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.FlashAttention4Executor())
# An executor that needs less takes more: the reference takes any permutation.
bs.Pipeline(bs.SegmentKeySort(), bs.MeanPoolScorer(), bs.Everything(), bs.ReferenceExecutor())
# The algebra keeps the stronger need, in either order.
both: bs.Selector[bs.BlockMass, bs.BlockMask] = bs.Sink() | bs.TopCdf(0.9)
turned: bs.Selector[bs.BlockMass, bs.BlockMask] = bs.TopCdf(0.9) | bs.Sink()
narrowed: bs.Selector[bs.BlockMass, bs.BlockMask] = bs.SharedByGroup(bs.TopCdf(0.9)) & bs.TopK(3)
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9) | bs.Band(256) | bs.Sink(4), bs.AutoExecutor())
assert_type(paper | bs.Band(128), bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask])
bs.TopCdf([0.6, 0.7, 0.8, 0.9])
bs.TopCdf(torch.full((32,), 0.9))

# What a layer asks for is an argument of a call; a choice has the type of its mask.
x = torch.rand(1, 4, 8, 16)
assert_type(paper(x, x, x, window=4096, softcap=50.0, sinks=[0.0] * 4), torch.Tensor)
assert_type(paper.choose(x, x, window=4096), bs.Choice[bs.BlockMask])
assert_type(paper.attend(x, x, x, paper.choose(x, x)), bs.AttentionOutput)

trace = paper.trace(torch.rand(1, 4, 8, 16), torch.rand(1, 2, 8, 16), torch.rand(1, 2, 8, 16))
assert_type(trace.permutation, bs.GlobalPermutation)
assert_type(trace.scores, bs.BlockMass)
assert_type(trace.mask, bs.BlockMask)


@attrs.frozen(eq=False)
class PerSegment(bs.Permuter[bs.Permutation]):
    """A user's permuter with an order per query segment."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, spec: bs.AttentionSpec) -> bs.Permutation:
        return bs.Permutation(group=64, k_index=torch.zeros(1, 1, 1, 1, dtype=torch.int32))


@attrs.frozen(eq=False)
class AnyOrder(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """A user's scorer that takes any permutation and gives logits."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec
    ) -> bs.BlockScores:
        grid = bs.Grid.of(q, k, permutation, spec, q_block=16, k_block=16)
        return bs.BlockScores(torch.zeros(1, 1, grid.rows, grid.cols), grid)


@attrs.frozen(eq=False)
class Remembering(AnyOrder):
    """One that also takes a history, and another selector that says what it takes."""

    traits = bs.ScorerTraits(history=True)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        permutation: bs.Permutation,
        spec: bs.AttentionSpec,
        history: bs.KeyHistory | None = None,
    ) -> bs.BlockScores:
        return super().__call__(q, k, permutation, spec)


@attrs.frozen(eq=False)
class Own(bs.Selector[bs.BlockScores, bs.BlockMask]):
    """A user's selector, which joins another mask itself."""

    traits = bs.SelectorTraits(mask=True)

    def __call__(self, scores: bs.BlockScores, *, mask: bs.BlockMask | None = None) -> bs.BlockMask:
        kept = bs.TopK(2)(scores)
        return kept if mask is None else kept | mask


bs.Pipeline(PerSegment(), Remembering(), bs.TopK(2) | Own(), bs.ReferenceExecutor())
bs.Pipeline(PerSegment(), AnyOrder(), bs.TopK(2), bs.ReferenceExecutor())
bs.Pipeline(bs.SegmentKeySort(), AnyOrder(), bs.Threshold(0.0), bs.TritonExecutor())


# Stages of different papers must compose, and the type must say what came out.
# PBS-Attn's order, XAttention's scores, BFLA's rescues, S2O's executor.
four_papers = bs.Pipeline(
    bs.SegmentKeySort(256),
    bs.AntidiagonalScorer(8),
    bs.Ranked(bs.TopCdf(0.9) | bs.Band(256) | bs.Random(0.05)),
    bs.GatherExecutor(0.01),
)
assert_type(four_papers, bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.RankedBlockMask])

# S2O's order with a cumulative selector on its own scores.
cumulative = bs.Pipeline(
    bs.GlobalIndexMap(256), bs.PrefixOrderScorer(64), bs.Ranked(bs.TopCdf(0.9)), bs.GatherExecutor(0.0)
)
assert_type(cumulative, bs.Pipeline[bs.Permutation, bs.BlockMass, bs.RankedBlockMask])

# Every preset takes an executor that takes less.
bs.sparge(executor=bs.ReferenceExecutor())
bs.s2o(executor=bs.ReferenceExecutor())
bs.Schedule(bs.pbs_attn(), layers={3: bs.s2o(), -1: None}, dense=(0, 1))

# A schedule takes what gives one, for a model.
bs.triangle_mix(8).resolve(32)

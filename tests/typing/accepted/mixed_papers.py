"""Stages of different papers must compose, and the type must say what came out."""

from typing import assert_type

import blocksparse as bs

# PBS-Attn's order, XAttention's scores, BFLA's rescues, S2O's executor.
four_papers = bs.Pipeline(
    bs.SegmentKeySort(256),
    bs.AntidiagonalScorer(8),
    bs.Ranked(bs.TopCdf(0.9) | bs.Band(256) | bs.Random(0.05)),
    bs.GatherExecutor(0.01),
)
assert_type(four_papers, bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.RankedBlockMask])

# BFLA's scores behind SpargeAttn's gate.
gated: bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask] = bs.Pipeline(
    bs.Identity(),
    bs.SimilarityGatedScorer(bs.FlattenMaxPoolScorer(256, 64), 0.5),
    bs.TopCdf(0.98, crossing=False),
    bs.AutoExecutor(),
)

# A video order under an antidiagonal.
video: bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask] = bs.Pipeline(
    bs.HilbertOrder((13, 30, 45), prefix=226),
    bs.AntidiagonalScorer(8),
    bs.TopCdf(0.9) | bs.Sink(226),
    bs.TritonExecutor(),
)

# S2O's order with a cumulative selector on its own scores.
cumulative = bs.Pipeline(
    bs.GlobalIndexMap(256), bs.PrefixOrderScorer(64), bs.Ranked(bs.TopCdf(0.9)), bs.GatherExecutor(0.0)
)
assert_type(cumulative, bs.Pipeline[bs.Permutation, bs.BlockMass, bs.RankedBlockMask])

# What routes heads needs the scores that tell them apart; rules for masses take them as well.
routed: bs.Pipeline[bs.GlobalPermutation, bs.VerticalSlashScores, bs.BlockMask] = bs.Pipeline(
    bs.SegmentKeySort(256),
    bs.VerticalSlashScorer(),
    bs.RoutedByDivergence(0.1, similar=bs.TopCdf(0.9), otherwise=bs.VerticalSlashCdf(0.95)) | bs.Sink(),
    bs.FlexExecutor(),
)

# Rescues on finer blocks than the scores have.
bs.Pipeline(
    bs.Identity(),
    bs.FlattenMaxPoolScorer(256, 64),
    bs.SharedByGroup(bs.Refined(bs.TopCdf(0.99), 4) | bs.OnTiles(bs.Stride(16), 4)),
    bs.AutoExecutor(),
)

# Every preset takes an executor that takes less.
bs.sparge(executor=bs.ReferenceExecutor())
bs.s2o(executor=bs.ReferenceExecutor())
bs.Schedule(bs.pbs_attn(), layers={3: bs.s2o(), -1: None}, dense=(0, 1))

# Prism's bands beside FlashPrefill's rows, each with a rule of its own, and BFLA's band around both.
two_scores = bs.Pipeline(
    bs.Identity(),
    bs.ScorerPair(bs.RotaryBandScorer((0.0, 0.5)), bs.QueryRowsScorer()),
    bs.SelectorPair(bs.TopCdf(0.95), bs.PeakShare(0.1)) | bs.Band(128),
    bs.AutoExecutor(),
)

# Sol-Attn's rule along a curve, beside the window of NABLA.
by_deviation: bs.Pipeline[bs.GlobalPermutation, bs.BlockLogits, bs.BlockMask] = bs.Pipeline(
    bs.TileOrder((8, 16, 16), (1, 8, 8)),
    bs.MeanLogitScorer(),
    bs.MeanStd(1.5) | bs.TileWindow((8, 16, 16)),
    bs.Int8Executor(),
)

# Stem's scores look at values, and its numbers of blocks take any scores.
by_values: bs.Pipeline[bs.GlobalPermutation, bs.BlockLogits, bs.BlockMask] = bs.Pipeline(
    bs.SegmentKeySort(), bs.OutputAwareScorer(), bs.DecayingTopK(40) | bs.Band(128), bs.AutoExecutor()
)

# A schedule takes what gives one, for a model.
bs.triangle_mix(8).resolve(32)

"""Each line marked `# E:` must be an error with that text, and no other line may be."""

import attrs
import torch
from torch import Tensor

import blocksparse as bs


@attrs.frozen(eq=False)
class PerSegment(bs.Permuter[bs.Permutation]):
    def __call__(self, q: Tensor, k: Tensor, spec: bs.AttentionSpec) -> bs.Permutation:
        return bs.Permutation()


@attrs.frozen(eq=False)
class Logits(bs.Scorer[bs.Permutation, bs.BlockScores]):
    def __call__(self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec) -> bs.BlockScores:
        raise NotImplementedError


@attrs.frozen(eq=False)
class EarlyStop(bs.Executor[bs.Permutation, bs.RankedBlockMask]):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: bs.RankedBlockMask, spec: bs.AttentionSpec, out: Tensor | None = None) -> bs.AttentionOutput:
        raise NotImplementedError

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: bs.RankedBlockMask, spec: bs.AttentionSpec) -> list[str]:
        return []


# A per-segment order into an executor that gathers once.
order: bs.Pipeline[bs.Permutation, bs.BlockScores, bs.BlockMask] = bs.Pipeline(PerSegment(), Logits(), bs.TopK(4), bs.TritonExecutor())  # E: Argument 4 to "Pipeline" has incompatible type "TritonExecutor"; expected "Executor[Permutation, BlockMask]"

# Values that are no argument of the role, and logits by values into a rule for masses.
@attrs.frozen(eq=False)
class WithoutValues(bs.ValueScorer[bs.Permutation, bs.BlockScores]):
    def with_values(self, q: Tensor, k: Tensor, permutation: bs.Permutation, spec: bs.AttentionSpec) -> bs.BlockScores:  # E: Signature of "with_values" incompatible with supertype "blocksparse.score.scorer.ValueScorer"
        raise NotImplementedError


by_values: bs.Pipeline[bs.GlobalPermutation, bs.BlockLogits, bs.BlockMask] = bs.Pipeline(bs.Identity(), bs.OutputAwareScorer(), bs.TopCdf(0.9), bs.AutoExecutor())  # E: Argument 3 to "Pipeline" has incompatible type "TopCdf"; expected "Selector[BlockLogits, BlockMask]"

# An unranked mask into early stop.
unranked: bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask] = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9), EarlyStop())  # E: Argument 4 to "Pipeline" has incompatible type "EarlyStop"; expected "Executor[GlobalPermutation, BlockMask]"

# Swapped stages.
swapped: bs.Pipeline[bs.GlobalPermutation, bs.BlockMass, bs.BlockMask] = bs.Pipeline(
    bs.Identity(),
    bs.TopCdf(0.9),  # E: Argument 2 to "Pipeline" has incompatible type "TopCdf"; expected "Scorer[GlobalPermutation, BlockMass]"
    bs.MeanPoolScorer(),  # E: Argument 3 to "Pipeline" has incompatible type "MeanPoolScorer"; expected "Selector[BlockMass, BlockMask]"
    bs.ReferenceExecutor(),
)

# Without an annotation the type variable's name is the message.
bs.Pipeline(PerSegment(), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "PermutationT" of "Pipeline"
bs.Pipeline(bs.Identity(), Logits(), bs.TopCdf(0.9), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
bs.Pipeline(bs.Identity(), Logits(), bs.TopK(1), EarlyStop())  # E: Cannot infer value of type parameter "MaskT" of "Pipeline"


# A stage whose method contradicts its type parameters.
@attrs.frozen(eq=False)
class Contradicts(bs.Selector[bs.BlockScores, bs.BlockMask]):
    def __call__(self, scores: bs.BlockMass) -> bs.BlockMask:  # E: Argument 1 of "__call__" is incompatible with supertype "blocksparse.select.selector.Selector"; supertype defines the argument type as "BlockScores"
        raise NotImplementedError


class Finer(bs.TopCdf):  # E: Cannot inherit from final class "TopCdf"
    pass


# Nothing is accepted and ignored.
pipeline = bs.pbs_attn()
x = torch.rand(1, 1, 8, 16)
pipeline(x, x, x, torch.ones(8, 8))  # E: Argument 4 to "__call__" of "Pipeline" has incompatible type "Tensor"; expected "None"
pipeline(x, x, x, dropout_p=0.1)  # E: Unexpected keyword argument "dropout_p" for "__call__" of "Pipeline"
bs.TopCdf("0.9")  # E: Argument 1 to "TopCdf" has incompatible type "str"
bs.s2o() | bs.Band(128)  # E: No overload variant of "__ror__" of "PositionSelector" matches argument type "Pipeline[Permutation, BlockScores, RankedBlockMask]"
bs.Sink() | bs.Identity()  # E: No overload variant of "__or__" of "PositionSelector" matches argument type "Identity"

# An order per segment has no one order to gather keys in, nor to pool them by.
bs.Pipeline(bs.GlobalIndexMap(256), bs.NoScorer(), bs.Everything(), bs.TritonExecutor())  # E: Cannot infer value of type parameter "PermutationT" of "Pipeline"
bs.Pipeline(bs.GlobalIndexMap(256), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "PermutationT" of "Pipeline"
# Early stop needs a rank, and a union loses it.
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.Ranked(bs.TopCdf(0.9)) | bs.Sink(), bs.GatherExecutor(0.1))  # E: Cannot infer value of type parameter "MaskT" of "Pipeline"
# A router needs scores that tell heads apart; a gate needs masses; tiles need a rule of positions.
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.VerticalSlashCdf(0.9), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
bs.SimilarityGatedScorer(bs.NoScorer(), 0.5)  # E: Argument 1 to "SimilarityGatedScorer" has incompatible type "NoScorer"; expected "Scorer[GlobalPermutation, BlockMass]"
bs.OnTiles(bs.TopK(3), 2)  # E: Argument 1 to "OnTiles" has incompatible type "TopK"; expected "PositionSelector"

# Logits are no mass, and a mass has no mean of logits; a share of the peak is one of a mass.
bs.Pipeline(bs.Identity(), bs.MeanLogitScorer(), bs.TopCdf(0.9), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.MeanStd(1.0), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
bs.Pipeline(bs.Identity(), bs.MeanLogitScorer(), bs.PeakShare(0.1), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
# Two selectors for two scores: not for one score, and each for its own.
bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), bs.SelectorPair(bs.TopCdf(0.9), bs.TopCdf(0.9)), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
bs.Pipeline(bs.Identity(), bs.ScorerPair(bs.MeanLogitScorer(), bs.MeanPoolScorer()), bs.SelectorPair(bs.TopCdf(0.9), bs.TopCdf(0.9)), bs.ReferenceExecutor())  # E: Cannot infer value of type parameter "ScoresT" of "Pipeline"
# A preset for a model's layers is no pipeline.
layers: bs.Pipeline[bs.GlobalPermutation, bs.BlockScores, bs.BlockMask] = bs.triangle_mix(8)  # E: Incompatible types in assignment

"""What mypy rejects, a pipeline refuses when it is made: one sentence with what was needed and what there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.testing import make_qkv
from tests import stages
from tests.specs import wrong

Masses = "a BlockMass is non-negative scores whose sums along a row have a meaning"
REFERENCE, TRITON, EARLY = bs.ReferenceExecutor(), bs.TritonExecutor(), bs.GatherExecutor(0.1)


def composed(*four: Any) -> Callable[[], object]:
    return lambda: bs.Pipeline(*four)


NONSENSE: list[tuple[Callable[[], object], str]] = [
    (composed(bs.GlobalIndexMap(256), bs.NoScorer(), bs.Everything(), TRITON), "TritonExecutor needs a GlobalPermutation, and GlobalIndexMap gives a Permutation: a GlobalPermutation is one order of the keys that all queries share"),
    (composed(bs.GlobalIndexMap(256), bs.MeanPoolScorer(), bs.TopCdf(0.9), REFERENCE), "MeanPoolScorer needs a GlobalPermutation, and GlobalIndexMap gives a Permutation"),
    (composed(bs.GlobalIndexMap(256), bs.SimilarityGatedScorer(bs.MeanPoolScorer(), 0.5), bs.TopCdf(0.9), REFERENCE), "SimilarityGatedScorer needs a GlobalPermutation, and GlobalIndexMap gives"),
    (composed(bs.GlobalIndexMap(256), bs.NoScorer(), bs.Everything(), bs.AutoExecutor()), "AutoExecutor needs a GlobalPermutation"),
    (composed(bs.Identity(), bs.NoScorer(), bs.TopCdf(0.9), REFERENCE), f"TopCdf needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"),
    (composed(bs.Identity(), bs.NoScorer(), bs.GlobalTopCdf(0.9), REFERENCE), "GlobalTopCdf needs a BlockMass, and NoScorer gives a BlockScores"),
    (composed(bs.Identity(), stages.AnyOrder(16), bs.TopCdf(0.9) | bs.Sink(), REFERENCE), "TopCdf needs a BlockMass, and AnyOrder gives a BlockScores"),
    (composed(bs.Identity(), stages.AnyOrder(16), bs.SharedByGroup(bs.Refined(bs.TopCdf(0.9), 2)), REFERENCE), "TopCdf needs a BlockMass, and AnyOrder gives a BlockScores"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.VerticalSlashCdf(0.9), REFERENCE), "VerticalSlashCdf needs a VerticalSlashScores, and MeanPoolScorer gives a BlockMass"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.VerticalSlashTopK() | bs.Sink(), REFERENCE), "VerticalSlashTopK needs a VerticalSlashScores, and MeanPoolScorer gives a BlockMass"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9), EARLY), "GatherExecutor needs a RankedBlockMask, and TopCdf gives a BlockMask: .*`Ranked"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.Ranked(bs.TopCdf(0.9)) | bs.Sink(), EARLY), "GatherExecutor needs a RankedBlockMask, and Union gives a BlockMask"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.SharedByGroup(bs.Ranked(bs.TopCdf(0.9))), EARLY), "GatherExecutor needs a RankedBlockMask, and SharedByGroup gives a BlockMask"),
    (composed(bs.Identity(), bs.TopCdf(0.9), bs.MeanPoolScorer(), REFERENCE), "'scorer' must be .*Scorer"),
    (composed(bs.MeanPoolScorer(), bs.Identity(), bs.TopCdf(0.9), REFERENCE), "'permuter' must be .*Permuter"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), REFERENCE, bs.TopCdf(0.9)), "'selector' must be .*Selector"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf(0.9), bs.Identity()), "'executor' must be .*Executor"),
    (composed(bs.Identity(), bs.MeanPoolScorer(), bs.TopCdf, REFERENCE), "'selector' must be .*Selector"),
    (lambda: bs.SimilarityGatedScorer(wrong(bs.NoScorer()), 0.5), f"SimilarityGatedScorer needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"),
    (lambda: bs.OnTiles(wrong(bs.TopK(3)), 2), "'rule' must be .*PositionSelector"),
    (lambda: bs.SegmentQuerySort(keys=wrong(bs.GlobalIndexMap(64))), "SegmentQuerySort needs a GlobalPermutation, and GlobalIndexMap gives a Permutation"),
    (lambda: bs.Sink() | wrong(bs.Identity()), "unsupported operand|must be .*Selector"),
    (lambda: bs.s2o(executor=wrong(bs.TritonExecutor())), "TritonExecutor needs a GlobalPermutation, and GlobalIndexMap gives"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused_when_it_is_composed(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        make()


def test_every_legal_composition_is_accepted() -> None:
    """Type parameters decide for every example of a stage, and refuse nothing that mypy accepts.

    What type parameters decide is whether two stages fit. Every two that meet are composed: a scorer with each of its
    selectors behind the first order that it takes, and with one in turn behind the others.
    """
    made, seen = 0, set()
    for turn, (permuter, scorer) in enumerate(stages.fronts()):
        fitting = stages.selectors_for(scorer)
        for selector in [fitting[turn % len(fitting)]] if scorer in seen else fitting:
            for executor in stages.EXECUTORS:
                if stages.runs_with(executor, permuter, selector):
                    bs.Pipeline(permuter, scorer, selector, executor)
                    made += 1
                else:
                    with pytest.raises(TypeError, match="needs a"):
                        bs.Pipeline(permuter, scorer, selector, executor)
        seen.add(scorer)
    assert made > 1000


def test_an_executor_by_itself_says_what_it_needs() -> None:
    q, k, v = make_qkv(N=64, D=16)
    spec = bs.AttentionSpec(scale=0.25)
    mask = bs.TopCdf(0.5)(bs.MeanPoolScorer(16)(q, k, bs.GlobalPermutation(), spec))
    with pytest.raises(TypeError, match="GatherExecutor needs a RankedBlockMask, and got a BlockMask"):
        bs.GatherExecutor()(q, k, v, wrong(mask), spec)
    groups = bs.Everything()(bs.NoScorer(16)(q, k, bs.GlobalIndexMap(32)(q, k, spec), spec))
    with pytest.raises(TypeError, match="TritonExecutor needs a GlobalPermutation, and got a Permutation"):
        bs.TritonExecutor()(q, k, v, groups, spec)
    with pytest.raises(TypeError, match="ReferenceExecutor needs a BlockMask, and got a Tensor"):
        bs.ReferenceExecutor()(q, k, v, wrong(mask.keep), spec)


class Untyped(bs.Selector):  # type: ignore[type-arg]
    """Gives no type parameters, as a notebook may."""

    def __call__(self, scores: Any) -> Any:
        return bs.TopK(2)(scores)


def test_a_stage_without_types_runs() -> None:
    q, k, v = make_qkv(N=64, D=16)
    out = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), Untyped(), REFERENCE)(q, k, v)
    assert torch.equal(out, bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), REFERENCE)(q, k, v))


class Mean(bs.Scorer):  # type: ignore[type-arg]
    """Says nothing either."""

    def __call__(self, q: Any, k: Any, permutation: Any, spec: bs.AttentionSpec) -> Any:
        return bs.MeanPoolScorer(16)(q, k, permutation, spec)


class OfAny(Mean, bs.Scorer[Any, Any]):
    pass


class OfEither(Mean, bs.Scorer[bs.GlobalPermutation | bs.Permutation, bs.BlockMass]):
    pass


class WithANote(Mean, bs.Scorer[bs.GlobalPermutation, Annotated[bs.BlockMass, "of means"]]):
    pass


class TakesEither(bs.Selector[bs.BlockMass | bs.VerticalSlashScores, bs.BlockMask]):
    def __call__(self, scores: Any) -> bs.BlockMask:
        return bs.TopK(2)(scores)


class Undocumented(bs.BlockMass):
    pass


class TakesUndocumented(bs.Selector[Undocumented, bs.BlockMask]):
    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.TopK(2)(scores)


ScoresT = TypeVar("ScoresT", bound=bs.BlockScores)


class Family(bs.Selector[ScoresT, bs.BlockMask], Generic[ScoresT]):
    def __call__(self, scores: bs.BlockScores) -> bs.BlockMask:
        return bs.TopK(2)(scores)


class OfMasses(Family[bs.BlockMass]):
    pass


@pytest.mark.parametrize(
    "scorer", [Mean(), OfAny(), OfEither(), WithANote()], ids=lambda scorer: type(scorer).__name__
)
def test_type_parameters_may_say_little(scorer: bs.Scorer[Any, Any]) -> None:
    q, k, v = make_qkv(N=64, D=16)
    out = bs.Pipeline(bs.Identity(), scorer, bs.TopCdf(0.9), REFERENCE)(q, k, v)
    assert torch.equal(out, bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopCdf(0.9), REFERENCE)(q, k, v))


def test_a_type_parameter_may_name_several_types() -> None:
    with pytest.raises(
        TypeError, match="TakesEither needs a BlockMass or a VerticalSlashScores, and NoScorer gives"
    ):
        composed(bs.Identity(), bs.NoScorer(), TakesEither(), REFERENCE)()
    for scorer in (bs.MeanPoolScorer(16), bs.VerticalSlashScorer(16)):
        bs.Pipeline(bs.Identity(), scorer, TakesEither(), REFERENCE)


def test_a_stage_without_types_is_held_to_what_takes_its_values() -> None:
    q, k, v = make_qkv(N=64, D=16)
    with pytest.raises(TypeError, match="Untyped must give a RankedBlockMask, and gave a BlockMask"):
        bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), Untyped(), EARLY)(q, k, v)


def test_type_parameters_through_a_family_of_stages() -> None:
    with pytest.raises(TypeError, match=f"OfMasses needs a BlockMass, and NoScorer gives a BlockScores: {Masses}"):
        composed(bs.Identity(), bs.NoScorer(), OfMasses(), REFERENCE)()
    bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), OfMasses(), REFERENCE)


def test_values_need_no_docstring() -> None:
    with pytest.raises(
        TypeError, match=r"TakesUndocumented needs an Undocumented, and NoScorer gives a BlockScores$"
    ):
        bs.Pipeline(bs.Identity(), bs.NoScorer(), wrong(TakesUndocumented()), REFERENCE)


def test_a_pipeline_that_also_keeps_what_a_selector_keeps() -> None:
    pipeline = bs.mean_pooling(0.9)
    banded = pipeline | bs.Band(128)
    assert banded == evolve(pipeline, selector=pipeline.selector | bs.Band(128))
    assert repr(banded.selector).endswith("| Band(tokens=128))")
    with pytest.raises(TypeError, match="GatherExecutor needs a RankedBlockMask"):
        wrong(bs.s2o()) | bs.Band(128)

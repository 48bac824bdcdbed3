"""Small examples of every stage, and every legal composition of them.

A stage that the package exports and this table lacks fails `test_every_stage_has_an_example`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar, get_args, get_origin

import attrs
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.selectors.selector import Intersection, Union


@attrs.frozen(eq=False)
class Shuffle(bs.Permuter[bs.GlobalPermutation]):
    """Keys and queries in random order: the hardest permutation an executor may meet."""

    def __call__(self, q: Tensor, k: Tensor, *, causal: bool, scale: float) -> bs.GlobalPermutation:
        generator = torch.Generator().manual_seed(0)
        k_index = torch.rand(*k.shape[:2], 1, k.shape[2], generator=generator).argsort(-1).int()
        q_index = torch.rand(*q.shape[:3], generator=generator).argsort(-1).int()
        return bs.GlobalPermutation(k_index.to(k.device), q_index.to(q.device))


@attrs.frozen(eq=False)
class AnyOrder(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """Different scores for every block, in any order of tokens."""

    block: int

    def __call__(
        self, q: Tensor, k: Tensor, permutation: bs.Permutation, *, causal: bool, scale: float
    ) -> bs.BlockScores:
        grid = bs.Grid.of(q, k, permutation, q_block=self.block, k_block=self.block, causal=causal)
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(*q.shape[:2], grid.rows, grid.cols, generator=generator)
        return bs.BlockScores(values.to(q.device), grid)


PERMUTERS: tuple[bs.Permuter[Any], ...] = (
    bs.Identity(),
    bs.SegmentKeySort(64, probe=16),
    bs.SegmentKeySort(48, probe=16, per_query_head=True, causal_probe=False),
    Shuffle(),
)
SCORERS: tuple[bs.Scorer[Any, Any], ...] = (
    bs.MeanPoolScorer(16),
    bs.MeanPoolScorer(32, padded_tail=True),
    bs.MeanPoolScorer(16, segment=64),
    bs.MeanPoolScorer(32, k_block=16),
    bs.NoScorer(16),
)
SELECTORS: tuple[bs.Selector[Any, Any], ...] = (
    bs.TopCdf(0.5),
    bs.TopCdf(0.6, crossing=False),
    bs.TopK(2),
    bs.TopK(share=0.3),
    bs.Threshold(0.2),
    bs.Band(20),
    bs.Sink(5),
    bs.FirstToken(),
    bs.Everything(),
    bs.SharedByGroup(bs.TopCdf(0.4)),
    bs.TopCdf(0.3) | bs.Band(8),
    bs.TopCdf(0.8) & bs.TopK(3),
    bs.Ranked(bs.TopK(share=0.5)),
)
# These halve the blocks: under 16 for a kernel on the finest grid.
REFINED: tuple[bs.Selector[Any, Any], ...] = (
    bs.Refined(bs.TopCdf(0.4), 2),
    bs.OnTiles(bs.Band(8), 2),
)
POSITIONS = tuple(s for s in SELECTORS if isinstance(s, bs.PositionSelector))
# Their choice depends on the last queries of a call, by their nature.
PROBES: tuple[type, ...] = (bs.SegmentKeySort,)
CAUSAL_ONLY: tuple[type, ...] = ()
EXECUTORS: tuple[bs.Executor[Any, Any], ...] = (
    bs.ReferenceExecutor(),
    bs.TritonExecutor(),
    bs.FlexExecutor(),
    bs.AutoExecutor(),
)


def needs(stage: object, role: type, position: int) -> type:
    """What a stage declares in place `position` of its role's type parameters; wrappers ask their parts."""
    for base in type(stage).__orig_bases__:  # type: ignore[attr-defined]
        if get_origin(base) is role:
            declared = get_args(base)[position]
            if not isinstance(declared, TypeVar):
                return get_origin(declared) or declared  # type: ignore[no-any-return]
            parts = [getattr(stage, name) for name in attrs.asdict(stage, recurse=False)]  # type: ignore[arg-type]
            wanted = [needs(part, role, position) for part in parts if isinstance(part, role)]
            return max(wanted, key=lambda value: len(value.__mro__))
    raise AssertionError(f"{type(stage).__name__} does not say what it needs in its class line")


def fronts() -> Iterator[tuple[bs.Permuter[Any], bs.Scorer[Any, Any]]]:
    """Every (permuter, scorer) whose declared types fit."""
    for permuter, scorer in itertools.product(PERMUTERS, SCORERS):
        if issubclass(needs(permuter, bs.Permuter, 0), needs(scorer, bs.Scorer, 0)):
            yield permuter, scorer


def selectors_for(scorer: bs.Scorer[Any, Any]) -> list[bs.Selector[Any, Any]]:
    """Every selector that takes what the scorer gives."""
    given = needs(scorer, bs.Scorer, 1)
    return [s for s in (*SELECTORS, *REFINED) if issubclass(given, needs(s, bs.Selector, 0))]


def runs_with(
    executor: bs.Executor[Any, Any], permuter: bs.Permuter[Any], selector: bs.Selector[Any, Any]
) -> bool:
    """Whether the declared types of what stands before the executor are what it needs."""
    return issubclass(needs(permuter, bs.Permuter, 0), needs(executor, bs.Executor, 0)) and issubclass(
        needs(selector, bs.Selector, 1), needs(executor, bs.Executor, 1)
    )


def name(*stages: object) -> str:
    """A readable test id."""
    return "-".join(
        f"{name(stage.first)}{'|' if isinstance(stage, Union) else '&'}{name(stage.second)}"
        if isinstance(stage, Union | Intersection)
        else repr(stage).replace(" ", "")
        for stage in stages
    )

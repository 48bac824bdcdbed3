"""Small examples of every stage, and every legal composition of them.

Tables name what default arguments do not show, and `with_others` adds every other stage that the package exports.
A stage with a required argument needs a line here, or `test_every_stage_has_an_example` fails.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import attrs
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.select.selector import Intersection, Union

PLAIN: AnyPipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(16), bs.TopK(2), bs.ReferenceExecutor())


@attrs.frozen(eq=False)
class Shuffle(bs.Permuter[bs.GlobalPermutation]):
    """Keys and queries in random order: the hardest permutation an executor may meet."""

    def __call__(self, q: Tensor, k: Tensor, spec: bs.AttentionSpec) -> bs.GlobalPermutation:
        generator = torch.Generator().manual_seed(0)
        k_index = torch.rand(*k.shape[:2], 1, k.shape[2], generator=generator).argsort(-1).int()
        q_index = torch.rand(*q.shape[:3], generator=generator).argsort(-1).int()
        return bs.GlobalPermutation(k_index.to(k.device), q_index.to(q.device))


def random_keys(k: Tensor, heads: int | None = None, segment: int | None = None) -> bs.GlobalPermutation:
    """Keys `[B, Hkv, N, D]` in random order, inside of segments or anywhere, by KV head or for so many heads."""
    B, Hkv, N, _ = k.shape
    turn = torch.rand(B, heads or Hkv, 1, N, generator=torch.Generator().manual_seed(0))
    inside = turn if segment is None else turn + torch.arange(N) // segment
    return bs.GlobalPermutation(inside.argsort(-1).int().to(k.device))


@attrs.frozen(eq=False)
class AnyOrder(bs.Scorer[bs.Permutation, bs.BlockScores]):
    """Different scores for every block, in any order of tokens."""

    block: int

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockScores:
        grid = bs.Grid.of(q, k, permutation, spec, q_block=self.block, k_block=self.block)
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(*q.shape[:2], grid.rows, grid.cols, generator=generator)
        return bs.BlockScores(values.to(q.device), grid)


class ByReference(bs.Executor[Any, Any]):
    """The reference by another name: it runs everything, keeps each mask that it got, and may be spoilt."""

    def __init__(self) -> None:
        self.masks: list[bs.BlockMask] = []

    def unsupported(self, *given: Any, **more: Any) -> list[str]:
        return []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **more: Any) -> bs.AttentionOutput:
        self.masks.append(mask)
        return bs.ReferenceExecutor()(q, k, v, mask, *rest, **more)


class DenseBelow(ByReference):
    """Has calls of fewer keys attend densely, as `AutoExecutor` does on a GPU."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: bs.AttentionSpec) -> str | None:
        return "little work" if k.shape[2] < self.keys else None


def exported(role: type, but: tuple[type, ...] = ()) -> list[type]:
    """Stages of a role that the package exports, except those that are `but` as well."""
    found = [x for x in map(vars(bs).get, bs.__all__) if inspect.isclass(x) and not inspect.isabstract(x)]
    return [x for x in found if issubclass(x, role) and not issubclass(x, but)]


def with_others(role: type, *examples: Any, but: tuple[type, ...] = ()) -> tuple[Any, ...]:
    """These examples, and one with default arguments of each other stage of the role that needs no argument.

    Prompts of tests are short: whole numbers from 64 up, such as blocks of 128 tokens, become 16.
    """
    others = []
    for cls in exported(role, but):
        fields: Any = [each for each in attrs.fields(cls) if each.init]
        if all(cls is not type(x) for x in examples) and all(each.default is not attrs.NOTHING for each in fields):
            others.append(cls(**{x.alias: 16 for x in fields if type(x.default) is int and x.default >= 64}))
    return (*examples, *others)


PERMUTERS: tuple[bs.Permuter[Any], ...] = with_others(
    bs.Permuter,
    bs.Identity(),
    bs.SegmentKeySort(64, last_q=16),
    bs.SegmentKeySort(48, last_q=16, per_query_head=True, causal_last_q=False),
    Shuffle(),
    bs.SegmentQuerySort(32, block=16),
    bs.SegmentQuerySort(48, block=16, keys=bs.SegmentKeySort(48, last_q=16)),
    bs.GlobalIndexMap(32),
    bs.GlobalIndexMap(32, per_query_head=False, order_queries=False, near=40),
    bs.HilbertOrder((2, 4, 7), prefix=5, suffix=None),
    bs.TileOrder((3, 4, 5), (2, 2, 2), prefix=3, suffix=None),
    bs.TimeOrder((3, 4, 5), suffix=None),
    bs.ColumnOrder((3, 4, 5), prefix=1, suffix=None),
    bs.RasterOrder((3, 4, 5), prefix=2, suffix=None),
    bs.KMeansOrder(5, 7, iterations=3, suffix=2),
    bs.GivenOrder((2, 3, 4), torch.arange(23, -1, -1), prefix=30, suffix=None),
)
# With queries in place, a chunk of them is a chunk of the permutation too.
SCORERS: tuple[bs.Scorer[Any, Any], ...] = with_others(
    bs.Scorer,
    bs.MeanPoolScorer(16),
    bs.MeanPoolScorer(32, padded_tail=True),
    bs.MeanPoolScorer(32, k_block=16),
    bs.FlattenMaxPoolScorer(32, 16),
    bs.FlattenMaxPoolScorer(16, 16, per_token=True),
    bs.FlattenMaxPoolScorer(32, 8, k_block=16, padded_tail=True),
    bs.AntidiagonalScorer(4, block=16),
    bs.AntidiagonalScorer(8, block=32, pattern="slash", padded_tail=True),
    bs.AntidiagonalScorer(4, block=32, k_block=16, pattern="sum", forced=False),
    bs.AntidiagonalScorer(4, block=16, pattern="sum", normalize=False),
    bs.MeanLogitScorer(16, variance="diagonal"),
    bs.RotaryBandScorer((0.0, 0.5), 16),
    bs.ScorerPair(bs.RotaryBandScorer((0.25, 1.0), 16, temperature=0.5), bs.QueryRowsScorer(16)),
    bs.SampledQueriesScorer(bs.AntidiagonalScorer(4, block=32, k_block=16, pattern="sum"), 16, 4),
    bs.SampledQueriesScorer(bs.MeanPoolScorer(16), 8, 0.5),
    bs.SimilarityGatedScorer(bs.MeanPoolScorer(32, k_block=16), 0.3),
    bs.SimilarityGatedScorer(bs.FlattenMaxPoolScorer(16, 16), 0.2, smooth_k=None),
    bs.VerticalSlashScorer(16),
    bs.VerticalSlashScorer(32, last_q=10, pooled=False),
    bs.ScorerByCausality(
        bs.AntidiagonalScorer(4, block=32, k_block=16), bs.MeanPoolScorer(32, k_block=16)
    ),  # one cut
    but=(bs.ValueScorer,),
)
SELECTORS: tuple[bs.Selector[Any, Any], ...] = with_others(
    bs.Selector,
    bs.TopCdf(0.5),
    bs.TopCdf(0.6, crossing=False),
    bs.TopK(2),
    bs.TopK(share=0.3),
    bs.DecayingTopK(2, 0.4),
    bs.Threshold(0.2),
    bs.PeakShare(0.4),
    bs.RowShare(0.15),
    bs.MeanStd(0.5),
    bs.SelectorPair(bs.TopCdf(0.5), bs.PeakShare(0.5)),
    bs.Radial((3, 4, 5), decay=0.5, prefix=4),
    bs.Frames((5, 3, 4), period=3, phase=1, radius=1),
    bs.TileWindow((3, 4, 5), tile=(1, 2, 2), prefix=2),
    bs.Band(20),
    bs.Sink(5),
    bs.Sink(1),
    bs.SharedByGroup(bs.TopCdf(0.4)),
    bs.TopCdf(0.3) | bs.Band(8),
    bs.TopCdf(0.8) & bs.TopK(3),
    bs.TopK(share=0.4, forced_first=False, of_all_keys=True),
    bs.Stride(3),
    bs.Band(8) | bs.Sink(3),
    bs.Random(0.2, 1),
    bs.SharedByGroup(bs.Random(0.3)),
    bs.LastQueries(20),
    bs.LastKeys(20),
    bs.GlobalTopCdf(0.7),
    bs.VerticalSlashCdf(0.8),
    bs.VerticalSlashTopK(10, 12, sink=2, recent=5),
    bs.VerticalSlashCdf(0.6, max_budget=32, released=True),
    bs.VerticalSlashTopK(10, 12, sink=2, recent=5, released=True),
    bs.RoutedByDivergence(0.3, similar=bs.GlobalTopCdf(0.6), otherwise=bs.VerticalSlashCdf(0.6)),
    bs.SelectorByCausality(bs.TopCdf(0.4) | bs.Band(8), bs.TopK(2)),
    bs.Ranked(bs.TopK(share=0.5)),
    bs.Ranked(bs.TopCdf(0.6) | bs.Random(0.2), first=bs.Band(20)),
)
# These halve the blocks: under 16 for a kernel on the finest grid.
REFINED: tuple[bs.Selector[Any, Any], ...] = (
    bs.Refined(bs.TopCdf(0.4), 2),
    bs.OnTiles(bs.Band(8), 2),
    bs.Refined(bs.SharedByGroup(bs.TopCdf(0.4)), 2) | bs.OnTiles(bs.Band(8) | bs.Random(0.3), 2),
    bs.Refined(bs.SharedByGroup(bs.TopCdf(0.4)), 2) | bs.SharedByGroup(bs.OnTiles(bs.Random(0.3), 2)),
)
# These get values beside keys, as `blocksparse.testing.check_stages` gives them.
VALUE_SCORERS: tuple[bs.ValueScorer[Any, Any], ...] = with_others(
    bs.ValueScorer,
    bs.OutputAwareScorer(4, block=16),
    bs.OutputAwareScorer(8, block=32, k_block=16, lengths=(1.0, 0.2)),
)
# Their choice depends on the last queries of a call, by their nature.
PROBES: tuple[type, ...] = (bs.SegmentKeySort, bs.VerticalSlashScorer, bs.RotaryBandScorer)
# Made of the kernels of other scorers, these meet two orders: tokens in place, and in random order.
OF_SAME_PARTS: tuple[type, ...] = (
    bs.QueryRowsScorer, bs.MeanLogitScorer, bs.RotaryBandScorer, bs.ScorerPair
)  # fmt: skip
# These choose for the whole call at once: one budget for all rows, the last rows or columns, a share of all keys.
WHOLE_CALL = tuple(
    s
    for s in SELECTORS
    if isinstance(s, bs.GlobalTopCdf | bs.LastQueries | bs.LastKeys | bs.DecayingTopK)
    or (isinstance(s, bs.TopK) and s.of_all_keys)
)
CAUSAL_ONLY: tuple[type, ...] = (bs.GlobalIndexMap,)
EXECUTORS: tuple[bs.Executor[Any, Any], ...] = with_others(
    bs.Executor,
    bs.GatherExecutor(0.0),
    bs.GatherExecutor(0.1, patience=2),
    bs.SkipSoftmaxExecutor(20.0),
    bs.MeanCorrectionExecutor(bs.ReferenceExecutor()),
)
# The first example of each class that the package exports.
BY_CLASS: dict[type, Any] = {
    type(x): x
    for x in reversed((*PERMUTERS, *SCORERS, *VALUE_SCORERS, *SELECTORS, *REFINED, *EXECUTORS))
    if type(x).__name__ in bs.__all__
}


def needs(stage: object, role: type, position: int) -> type:
    """What a stage declares in place `position` of its role's type parameters; wrappers ask their parts."""
    for base in type(stage).__orig_bases__:  # type: ignore[attr-defined]
        if issubclass(get_origin(base) or object, role):
            declared = get_args(base)[position]
            if not isinstance(declared, TypeVar):
                return get_origin(declared) or declared  # type: ignore[no-any-return]
            parts = [getattr(stage, name) for name in attrs.asdict(stage, recurse=False)]  # type: ignore[arg-type]
            wanted = [needs(part, role, position) for part in parts if isinstance(part, role)]
            return max(wanted, key=lambda value: len(value.__mro__))
    raise AssertionError(f"{type(stage).__name__} does not say what it needs in its type parameters")


@cache  # asked for hundreds of times, while tests are collected
def fronts() -> tuple[tuple[bs.Permuter[Any], bs.Scorer[Any, Any]], ...]:
    """Every (permuter, scorer) whose declared types fit."""
    return tuple(
        (permuter, scorer)
        for permuter, scorer in itertools.product(PERMUTERS, SCORERS)
        if issubclass(needs(permuter, bs.Permuter, 0), needs(scorer, bs.Scorer, 0))
        and (not isinstance(scorer, OF_SAME_PARTS) or isinstance(permuter, bs.Identity | Shuffle))
    )


def selectors_for(scorer: bs.Scorer[Any, Any]) -> list[bs.Selector[Any, Any]]:
    """Every selector that takes what the scorer gives."""
    given = needs(scorer, bs.Scorer, 1)
    return [s for s in (*SELECTORS, *REFINED) if issubclass(given, needs(s, bs.Selector, 0))]


def by_row(scorer: bs.Scorer[Any, Any]) -> list[bs.Selector[Any, Any]]:
    """The selectors that choose for each row of blocks by itself."""
    return [s for s in selectors_for(scorer) if not any(s is x for x in WHOLE_CALL)]


def is_first(permuter: bs.Permuter[Any], scorer: bs.Scorer[Any, Any]) -> bool:
    """Whether these are the first scorer that takes an order, and the first order of its kind."""
    kinds = (bs.Identity, bs.SegmentKeySort, bs.GlobalIndexMap, Shuffle)
    first = next(p for p in PERMUTERS if type(p) is type(permuter))
    takes = next(s for p, s in fronts() if p is permuter)
    return permuter is first and isinstance(permuter, kinds) and scorer is takes


def reads(executor: bs.Executor[Any, Any], permuter: bs.Permuter[Any]) -> bool:
    """Whether the executor takes what the permuter gives."""
    return issubclass(needs(permuter, bs.Permuter, 0), needs(executor, bs.Executor, 0))


def runs_with(
    executor: bs.Executor[Any, Any], permuter: bs.Permuter[Any], selector: bs.Selector[Any, Any]
) -> bool:
    """Whether the declared types of what stands before the executor are what it needs."""
    ranked = issubclass(needs(selector, bs.Selector, 1), needs(executor, bs.Executor, 1))
    return ranked and reads(executor, permuter)


def name(*stages: object) -> str:
    """A readable test id."""
    return "-".join(
        f"{name(stage.first)}{'|' if isinstance(stage, Union) else '&'}{name(stage.second)}"
        if isinstance(stage, Union | Intersection)
        else repr(stage).replace(" ", "")
        for stage in stages
    )


SMALL_BLOCKS: dict[str, bs.Pipeline[Any, Any, Any]] = {
    "pbs_attn": bs.pbs_attn(0.5, block=32, S=64),
    "mean_pooling": bs.mean_pooling(0.4, block=32),
    "queries_sorted": bs.Pipeline(
        bs.SegmentQuerySort(64, block=32), bs.MeanPoolScorer(32), bs.TopCdf(0.4), bs.ReferenceExecutor()
    ),
}

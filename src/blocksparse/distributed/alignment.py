"""Which stages choose for some of the queries what they choose for all, and where queries may be cut."""

from __future__ import annotations

from functools import singledispatch
from math import lcm
from typing import Any

import blocksparse as bs
from blocksparse.distributed.stages import parts
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.selectors.position_selector import PositionUnion
from blocksparse.selectors.selector import Intersection, Union


@singledispatch
def alignment(stage: object, causal: bool) -> int:
    """How many tokens the ends of chunks of queries must be a multiple of, for `stage` to choose as in one call.

    A chunk of a causal call has the keys up to its own end, a chunk of another call has all keys. Where a stage
    chooses differently for the whole call, by its last queries or by all of its rows at once, it is refused.
    Register a stage of your own that chooses in each row of blocks by itself: `alignment.register`.

    Raises:
        ValueError: the stage may choose otherwise for a chunk.
    """
    del causal
    raise ValueError(
        f"{type(stage).__name__} is not known to choose for some of the queries as it does for all of them: use "
        "Ulysses, which runs any pipeline on whole sequences, or register the stage with distributed.alignment"
    )


def aligned(pipeline: AnyPipeline, *, causal: bool) -> int:
    """The alignment of all stages of a pipeline.

    Raises:
        ValueError: a stage may choose otherwise for a chunk.
    """
    stages = pipeline.permuter, pipeline.scorer, pipeline.selector
    return lcm(*(alignment(stage, causal) for stage in stages))


def _of_any_token(_stage: object, _causal: bool) -> int:
    return 1


def _of_segments(stage: Any, _causal: bool) -> int:
    return int(stage.S)


def _of_blocks(stage: Any, _causal: bool) -> int:
    return lcm(stage.block, stage.k_block or 1)


def _of_parts(stage: object, causal: bool) -> int:
    return lcm(*(alignment(part, causal) for part in parts(stage)))


@alignment.register
def _(stage: bs.SimilarityGatedScorer, causal: bool) -> int:
    if causal and stage.smooth_k:
        raise ValueError("'smooth_k' subtracts the mean of all keys, and a chunk has only those up to its end")
    return _of_parts(stage, causal)


@alignment.register
def _(stage: bs.RotaryBandScorer, causal: bool) -> int:
    if stage.temperature is None:
        raise ValueError(
            "'RotaryBandScorer' without 'temperature' measures it over all blocks of a call: give one"
        )
    return _of_blocks(stage, causal)


@alignment.register
def _(stage: bs.SegmentQuerySort, causal: bool) -> int:
    return lcm(stage.S, alignment(stage.keys, causal))


@alignment.register
def _(stage: bs.TopK, causal: bool) -> int:
    if causal and stage.of_all_keys:
        raise ValueError("'of_all_keys' counts all keys, and a chunk has only those up to its end")
    return 1


def _of_positions(stage: object, causal: bool) -> int:
    name = type(stage).__name__
    if not causal:
        raise ValueError(f"'{name}' asks where queries stand, which a chunk of a call that is not causal forgets")
    if getattr(stage, "released", False):
        raise ValueError(f"'{name}' with 'released' counts rows from the start of the chunk")
    return 1


for rule, kinds in {
    _of_any_token: (bs.Identity, bs.Everything, bs.MeanStd, bs.PeakShare, bs.Sink, bs.Threshold, bs.TopCdf),
    _of_segments: (bs.SegmentKeySort, bs.GlobalIndexMap),
    _of_blocks: (
        bs.AntidiagonalScorer, bs.FlattenMaxPoolScorer, bs.MeanLogitScorer, bs.MeanPoolScorer, bs.NoScorer,
        bs.PrefixOrderScorer, bs.QueryRowsScorer,
    ),
    _of_positions: (bs.Band, bs.Random, bs.Stride),
    _of_parts: (
        bs.Ranked, bs.Refined, bs.ScorerPair, bs.SelectorPair, bs.SharedByGroup, bs.OnTiles, Intersection,
        PositionUnion, Union,
    ),
}.items():  # fmt: skip
    for kind in kinds:
        alignment.register(kind, rule)

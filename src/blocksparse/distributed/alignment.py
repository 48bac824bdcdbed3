"""Which stages choose for some of the queries what they choose for all, and where queries may be cut."""

from __future__ import annotations

from functools import singledispatch
from math import lcm
from typing import Any

from blocksparse.distributed.stages import parts
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.permuters.global_index_map import GlobalIndexMap
from blocksparse.permuters.identity import Identity
from blocksparse.permuters.segment_key_sort import SegmentKeySort
from blocksparse.permuters.segment_query_sort import SegmentQuerySort
from blocksparse.scorers.antidiagonal import AntidiagonalScorer
from blocksparse.scorers.flatten_max_pool import FlattenMaxPoolScorer
from blocksparse.scorers.mean_logit import MeanLogitScorer
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.scorers.prefix_order import PrefixOrderScorer
from blocksparse.scorers.query_rows import QueryRowsScorer
from blocksparse.scorers.rotary_band import RotaryBandScorer
from blocksparse.scorers.scorer_pair import ScorerPair
from blocksparse.scorers.similarity_gated import SimilarityGatedScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.everything import Everything
from blocksparse.selectors.mean_std import MeanStd
from blocksparse.selectors.on_tiles import OnTiles
from blocksparse.selectors.peak_share import PeakShare
from blocksparse.selectors.position_selector import PositionUnion
from blocksparse.selectors.random import Random
from blocksparse.selectors.ranked import Ranked
from blocksparse.selectors.refined import Refined
from blocksparse.selectors.selector import Intersection, Union
from blocksparse.selectors.selector_pair import SelectorPair
from blocksparse.selectors.shared_by_group import SharedByGroup
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.stride import Stride
from blocksparse.selectors.threshold import Threshold
from blocksparse.selectors.top_cdf import TopCdf
from blocksparse.selectors.top_k import TopK


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


@alignment.register(Identity)
@alignment.register(Everything)
@alignment.register(MeanStd)
@alignment.register(PeakShare)
@alignment.register(Sink)
@alignment.register(Threshold)
@alignment.register(TopCdf)
def _(_stage: object, _causal: bool) -> int:
    return 1


@alignment.register(SegmentKeySort)
@alignment.register(GlobalIndexMap)
def _(stage: SegmentKeySort | GlobalIndexMap, _causal: bool) -> int:
    return stage.S


@alignment.register
def _(stage: SegmentQuerySort, causal: bool) -> int:
    return lcm(stage.S, alignment(stage.keys, causal))


@alignment.register(AntidiagonalScorer)
@alignment.register(FlattenMaxPoolScorer)
@alignment.register(MeanLogitScorer)
@alignment.register(MeanPoolScorer)
@alignment.register(NoScorer)
@alignment.register(PrefixOrderScorer)
@alignment.register(QueryRowsScorer)
def _(stage: Any, _causal: bool) -> int:
    return lcm(stage.block, stage.k_block or 1)


@alignment.register
def _(stage: SimilarityGatedScorer, causal: bool) -> int:
    if causal and stage.smooth_k:
        raise ValueError("'smooth_k' subtracts the mean of all keys, and a chunk has only those up to its end")
    return lcm(*(alignment(part, causal) for part in parts(stage)))


@alignment.register
def _(stage: RotaryBandScorer, _causal: bool) -> int:
    if stage.temperature is None:
        raise ValueError(
            "'RotaryBandScorer' without 'temperature' measures it over all blocks of a call: give one"
        )
    return lcm(stage.block, stage.k_block or 1)


@alignment.register
def _(stage: TopK, causal: bool) -> int:
    if causal and stage.of_all_keys:
        raise ValueError("'of_all_keys' counts all keys, and a chunk has only those up to its end")
    return 1


@alignment.register(Band)
@alignment.register(Random)
@alignment.register(Stride)
def _(stage: Band | Random | Stride, causal: bool) -> int:
    name = type(stage).__name__
    if not causal:
        raise ValueError(f"'{name}' asks where queries stand, which a chunk of a call that is not causal forgets")
    if getattr(stage, "released", False):
        raise ValueError(f"'{name}' with 'released' counts rows from the start of the chunk")
    return 1


@alignment.register(Ranked)
@alignment.register(Refined)
@alignment.register(ScorerPair)
@alignment.register(SelectorPair)
@alignment.register(SharedByGroup)
@alignment.register(OnTiles)
@alignment.register(Intersection)
@alignment.register(PositionUnion)
@alignment.register(Union)
def _(stage: Any, causal: bool) -> int:
    return lcm(*(alignment(part, causal) for part in parts(stage)))

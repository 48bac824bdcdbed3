"""Tri-shape: A-shape, with dense rows at the end of the prompt (MInference's released code)."""

from __future__ import annotations

from blocksparse.executors.auto import AutoExecutor
from blocksparse.executors.executor import Executor
from blocksparse.permuters.identity import Identity
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.pipeline import Pipeline
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.last_queries import LastQueries
from blocksparse.selectors.sink import Sink
from blocksparse.validators import size


def tri_shape(
    sink: int = 128,  # released code of MInference, n_init
    local: int = 3968,  # the same, n_local
    last: int = 100,  # the same, n_last
    *,
    block: int = 64,  # the same
    executor: Executor[GlobalPermutation, BlockMask] | None = None,
) -> Pipeline[GlobalPermutation, BlockScores, BlockMask]:
    """Keep the first `sink` keys and the last `local` ones, and every key for the `last` queries.

    Blocks that hold any of these are kept whole: up to a block of rows more is dense.

    Args:
        sink: tokens at the start of the prompt.
        local: tokens of the window that ends with the query, at least 1.
        last: queries at the end of the call that see everything.
        block: tokens per block.
        executor: `AutoExecutor()` unless given.
    """
    size.check(sink=sink, local=local, last=last)
    return Pipeline(
        Identity(),
        NoScorer(block),
        Sink(sink) | Band(local - 1) | LastQueries(last),
        AutoExecutor() if executor is None else executor,
    )

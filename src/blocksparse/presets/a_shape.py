"""A-shape: the start of the prompt and a local window (StreamingLLM's pattern; MInference, arXiv 2407.02490)."""

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
from blocksparse.selectors.sink import Sink
from blocksparse.validators import size


def a_shape(
    sink: int = 128,  # released code of MInference, n_init
    local: int = 3968,  # the same, n_local
    *,
    block: int = 64,  # the same
    executor: Executor[GlobalPermutation, BlockMask] | None = None,
) -> Pipeline[GlobalPermutation, BlockScores, BlockMask]:
    """Keep the first `sink` keys and the last `local` ones, a query's own included.

    Blocks that hold any of these are kept whole, so a query sees up to two blocks more.

    Args:
        sink: tokens at the start of the prompt.
        local: tokens of the window that ends with the query, at least 1.
        block: tokens per block.
        executor: `AutoExecutor()` unless given.
    """
    size.check(sink=sink, local=local)
    return Pipeline(
        Identity(),
        NoScorer(block),
        Sink(sink) | Band(local - 1),
        AutoExecutor() if executor is None else executor,
    )

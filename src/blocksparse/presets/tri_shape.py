"""Tri-shape: A-shape, with dense rows at the end of the prompt (MInference's released code)."""

from __future__ import annotations

from blocksparse.checks.validators import size
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.last_queries import LastQueries
from blocksparse.selectors.sink import Sink


@kept
def tri_shape(
    sink: int = 128,  # n_init in the released code of MInference
    local: int = 3968,  # n_local in the same code
    last: int = 100,  # n_last in the same code
    *,
    block: int = 64,  # the same code
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first `sink` keys and the last `local` ones, and every key for the `last` queries.

    Blocks that hold any of these keys are kept whole. A row of blocks that holds one of these queries keeps every
    key for all its queries, so up to a block of queries more is dense.

    Args:
        sink: how many tokens at the start of the prompt are kept.
        local: tokens in the window that ends with the query, at least 1.
        last: how many queries at the end of the call see every key.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    size.check(sink=sink, local=local, last=last)
    return preset(
        Identity(),
        NoScorer(block),
        Sink(sink) | Band(local - 1) | LastQueries(last),
        executor,
    )

"""A-shape: the start of the prompt and a local window (StreamingLLM's pattern; MInference, arXiv 2407.02490)."""

from __future__ import annotations

from blocksparse.checks.validators import size
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockScores
from blocksparse.scorers.no_scorer import NoScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.sink import Sink


@kept
def a_shape(
    sink: int = 128,  # n_init in the released code of MInference
    local: int = 3968,  # n_local in the same code
    *,
    block: int = 64,  # the same code
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first `sink` keys and the last `local` ones, a query's own included.

    Blocks that hold any of these keys are kept whole, so a query may see up to two blocks of keys more.

    Args:
        sink: how many tokens at the start of the prompt are kept.
        local: tokens in the window that ends with the query, at least 1.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    size.check(sink=sink, local=local)
    return preset(
        Identity(),
        NoScorer(block),
        Sink(sink) | Band(local - 1),
        executor,
    )

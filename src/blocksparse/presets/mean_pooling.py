"""MeanPooling: the baseline of PBS-Attn (arXiv 2510.21270, section 4.1)."""

from __future__ import annotations

from blocksparse.checks.validators import flag
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.top_cdf import TopCdf


@kept
def mean_pooling(
    mass: Numbers = 0.9,  # section 4.1
    *,
    block: int = 128,  # section 4.1
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the heaviest pooled blocks and, in addition, always the first block and the diagonal.

    Args:
        mass: share of the row's pooled mass to keep; a number, or one per query head.
        block: tokens per block.
        as_released: include padding in the mean of a short tail block, as the authors' code does.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    return preset(
        Identity(),
        MeanPoolScorer(block, padded_tail=as_released),
        TopCdf(mass) | Sink(),
        executor,
    )

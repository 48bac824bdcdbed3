"""XAttention: Block Sparse Attention with Antidiagonal Scoring (arXiv 2503.16428)."""

from __future__ import annotations

from blocksparse.checks.validators import flag
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.antidiagonal import AntidiagonalScorer, Pattern
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.top_cdf import TopCdf


@kept
def xattention(
    mass: Numbers = 0.9,  # released code, xattn_estimate
    *,
    stride: int = 8,  # the paper has 8 and 16, the released loader 16
    block: int = 128,  # the only size that the released code takes
    pattern: Pattern = "antidiagonal",
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the first block, the diagonal, and the heaviest antidiagonal scores until they hold enough of the mass.

    The first block and the diagonal are counted in that share.

    Args:
        mass: share of the row's mass to keep; a number, or one per query head.
        stride: side of the cells of pairs whose antidiagonals are scored.
        block: tokens per block, a multiple of `stride`.
        pattern: which pairs of a cell are scored; `AntidiagonalScorer` lists the patterns.
        as_released: fill a short tail cell with zeros, as the authors' code does. Errors in its selection are not
            copied.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    return preset(
        Identity(),
        AntidiagonalScorer(stride, block=block, pattern=pattern, padded_tail=as_released),
        TopCdf(mass),
        executor,
    )

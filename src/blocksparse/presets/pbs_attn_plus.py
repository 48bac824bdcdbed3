"""PBS-Attn+: PBS-Attn's order with XAttention's scores (arXiv 2510.21270, appendix B.2)."""

from __future__ import annotations

from blocksparse.checks.validators import block_size, multiple, size
from blocksparse.permuters.segment_key_sort import SegmentKeySort
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.antidiagonal import AntidiagonalScorer
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.top_cdf import TopCdf


@kept
def pbs_attn_plus(
    mass: Numbers = 0.9,  # section 4.1
    *,
    stride: int = 8,  # the value of XAttention; appendix B.2 prints none
    block: int = 128,  # section 4.1
    S: int = 256,  # section 4.1
    per_query_head: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Sort keys by importance inside segments, then keep the heaviest antidiagonal scores of earlier segments.

    In addition, the row's own segment and the block that holds token 0 are always kept.

    Args:
        mass: share of the mass outside the row's own segment to keep; a number, or one per query head.
        stride: side of the cells of pairs whose antidiagonals are scored.
        block: tokens per block, a multiple of `stride`.
        S: tokens per segment, a multiple of `block`.
        per_query_head: make one key order per query head, as the paper does, instead of one per KV head.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(S=S)
    multiple("S", S, "block", block)
    return preset(
        SegmentKeySort(S, probe=block, per_query_head=per_query_head),
        AntidiagonalScorer(stride, block=block, forced=False),
        TopCdf(mass) | Sink(1),
        executor,
    )

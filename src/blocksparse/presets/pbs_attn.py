"""PBS-Attn: Sparser Block-Sparse Attention via Token Permutation (arXiv 2510.21270)."""

from __future__ import annotations

from blocksparse.checks.validators import block_size, flag, multiple, size
from blocksparse.permuters.segment_key_sort import SegmentKeySort
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.top_cdf import TopCdf


@kept
def pbs_attn(
    mass: Numbers = 0.9,  # section 4.1
    *,
    block: int = 128,  # section 4.1
    S: int = 256,  # section 4.1
    per_query_head: bool = False,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Sort keys by importance inside segments, then keep the heaviest pooled blocks of earlier segments.

    In addition, the row's own segment and the block that holds token 0 are always kept.

    Args:
        mass: share of the mass outside the row's own segment to keep; a number, or one per query head.
        block: tokens per block.
        S: tokens per segment, a multiple of `block`.
        per_query_head: make one key order per query head, as the paper does, instead of one per KV head.
        as_released: choose exactly as the authors' code does: there is an order per query head, it comes from a
            probe that is not causal and ignores the tail, and the mean of a short tail block includes padding.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(S=S)
    flag.check(per_query_head=per_query_head, as_released=as_released)
    multiple("S", S, "block", block)
    return preset(
        SegmentKeySort(S, probe=block, per_query_head=per_query_head or as_released, causal_probe=not as_released),
        MeanPoolScorer(block, padded_tail=as_released),
        TopCdf(mass) | Sink(1),
        executor,
    )

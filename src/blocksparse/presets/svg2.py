"""SVG2: Sparse VideoGen2, by clusters of like tokens (arXiv 2505.18875), in blocks of a fixed size."""

from __future__ import annotations

from blocksparse.checks.per_head import share
from blocksparse.permuters.kmeans_order import KMeansOrder
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.selectors.top_cdf import TopCdf
from blocksparse.selectors.top_k import TopK


@kept
def svg2(
    mass: Numbers = 0.9,  # released code
    *,
    least: Numbers = 0.1,  # the same: a tenth of all clusters of keys
    q_clusters: int = 300,  # the same, for Wan; 400 for HunyuanVideo
    k_clusters: int = 1000,  # the same
    iterations: int = 50,  # the same, in the first sparse step
    block: int = 64,
    prefix: int = 0,
    suffix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Order queries and keys by clusters; keep the heaviest pooled blocks. Made for calls that are not causal.

    Args:
        mass: share of the row's pooled mass to keep; a number, or one per query head.
        least: share of a row's blocks that are kept in any case, the heaviest.
        q_clusters: clusters of queries per query head.
        k_clusters: clusters of keys per KV head.
        iterations: steps of k-means.
        block: tokens per block.
        prefix: how many tokens of text at the start stay in place.
        suffix: how many tokens of text at the end do.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass, least=least)
    return preset(
        KMeansOrder(q_clusters, k_clusters, iterations=iterations, prefix=prefix, suffix=suffix),
        MeanPoolScorer(block),
        TopCdf(mass) | TopK(share=least),
        executor,
    )

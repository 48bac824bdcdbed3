"""SpargeAttn: Accurate Sparse Attention Accelerating Any Model Inference (arXiv 2502.18137)."""

from __future__ import annotations

from blocksparse.checks.per_head import share as a_share
from blocksparse.checks.validators import flag, optional, shown
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.mean_pool import MeanPoolScorer
from blocksparse.scorers.similarity_gated import SimilarityGatedScorer
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector
from blocksparse.selectors.sink import Sink
from blocksparse.selectors.top_cdf import TopCdf
from blocksparse.selectors.top_k import TopK


@kept
def sparge(
    mass: Numbers | None = None,
    theta: Numbers | None = None,
    *,
    share: Numbers | None = None,
    block: int = 128,  # appendix A.1
    k_block: int = 64,  # appendix A.1
    attention_sink: bool = True,  # released code, its module for tuned models; its plain functions have False
    smooth_k: bool | None = None,
    order: Permuter[GlobalPermutation] | None = None,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the heaviest pooled blocks within a target for their mass, and every block whose tokens are unlike.

    Blocks whose tokens are unlike are kept in addition and hold no mass. A causal diagonal is kept in any case.

    Args:
        mass: tau of the paper, the share of a row's pooled mass that the kept blocks may not exceed; a number, or
            one per query head. 0.98 if neither this nor `share` is given.
        theta: a block is judged by its mean only if its self-similarity is greater than this; a number, or one per
            query head. If None, 0.6; with `share` -0.1, so that every block is judged by its mean.
        share: keep this share of a row's reachable key blocks instead of a share of its mass.
        block: tokens per query block.
        k_block: tokens per key block.
        attention_sink: also keep the block that holds token 0.
        smooth_k: subtract the mean of all keys before the similarity of key blocks is measured. None does so only
            if the call is not causal, and with `as_released` always.
        order: a permuter, `HilbertOrder(grid)` for images and video (section 3.7), and `HilbertOrder()` where a
            host knows the grid; `Identity()` if None.
        as_released: choose as the authors' code does: keys are smoothed in causal calls too, a short last block is
            never similar, and `share` is a share of all key blocks. Their code may drop the diagonal, which is
            kept here all the same.
        executor: `AutoExecutor()` if None, which rounds nothing. `Int8Executor()` has the paper's 8-bit products
            (section 3.5) on Hopper, which save time from about 64K tokens on, and `pv_skip` of an executor leaves
            out products with values as the paper does (section 3.4).

    Raises:
        ValueError: `mass` and `share` are both given.
    """
    if mass is not None and share is not None:
        raise ValueError(f"give 'mass' or 'share', not both: {shown(mass)} and {shown(share)}")
    optional(a_share).check(mass=mass, share=share)
    flag.check(attention_sink=attention_sink, as_released=as_released)
    selector: Selector[BlockMass, BlockMask]
    if share is None:
        # Released code, spas_sage2_attn_meansim_cuda; the paper tunes both numbers per layer (section 3.6).
        selector = TopCdf(0.98 if mass is None else mass, crossing=False)
        theta = 0.6 if theta is None else theta
    else:
        selector = TopK(share=share, forced_first=False, of_all_keys=as_released)
        theta = -0.1 if theta is None else theta  # released code, spas_sage2_attn_meansim_topk_cuda
    return preset(
        order,
        SimilarityGatedScorer(
            MeanPoolScorer(block, k_block=k_block),
            theta,
            smooth_k=True if smooth_k is None and as_released else smooth_k,
            padded_tail=as_released,
        ),
        selector | Sink() if attention_sink else selector,
        executor,
    )

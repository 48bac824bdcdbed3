"""Presets for images and videos, and SpargeAttn's, which serves text as well: one function for each paper."""

from __future__ import annotations

from blocksparse.check.per_head import share
from blocksparse.check.per_head import share as a_share
from blocksparse.check.validators import block_size, count, flag, multiple, optional, shown, size
from blocksparse.order.content_orders import KMeansOrder
from blocksparse.order.grid_orders import TileOrder
from blocksparse.order.permutation import GlobalPermutation, Identity, Permuter
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.score.combined import SimilarityGatedScorer
from blocksparse.score.pooled import MeanLogitScorer, MeanPoolScorer, Variance
from blocksparse.score.scorer import BlockLogits, BlockMass, BlockScores, NoScorer
from blocksparse.score.strided import AntidiagonalScorer
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.grid_rules import Frames, Radial, TileWindow
from blocksparse.select.mass import TopCdf
from blocksparse.select.positions import Band, LastKeys, Sink
from blocksparse.select.selector import PositionSelector, Selector
from blocksparse.select.top_k import MeanStd, TopK


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
    Source: SpargeAttn, arXiv 2502.18137.

    Args:
        mass: tau of the paper, the share of a row's pooled mass that the kept blocks may not exceed. A number, or
            one per query head. If neither this nor `share` is given, it is 0.98.
        theta: a block is judged by its mean only if its self-similarity is greater than this. A number, or one per
            query head. If None, 0.6. With `share` -0.1: every block is judged by its mean.
        share: keep this share of a row's visible key blocks. It replaces `mass`.
        block: tokens per query block.
        k_block: tokens per key block.
        attention_sink: also keep the block of token 0.
        smooth_k: subtract the mean of all keys before similarity is measured. None does so only if the call is not
            causal, and with `as_released` always.
        order: a permuter. `HilbertOrder(grid)` for images and video (section 3.7), `HilbertOrder()` where a host
            knows the grid. `Identity()` if None.
        as_released: choose as the authors' code does. Keys are smoothed in causal calls too, a short last block is
            never similar, and `share` is a share of all key blocks. Their code may drop the diagonal, which is
            kept here all the same.
        executor: `AutoExecutor()` if None, which rounds nothing. `Int8Executor()` has the paper's 8-bit products
            (section 3.5) on Hopper, which save time from about 64K tokens on. `pv_skip` of an executor leaves out
            products with values as the paper does (section 3.4).

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
    smooth_k = True if smooth_k is None and as_released else smooth_k
    pooled = MeanPoolScorer(block, k_block=k_block)
    scorer = SimilarityGatedScorer(pooled, theta, smooth_k=smooth_k, padded_tail=as_released)
    return preset(order, scorer, selector | Sink() if attention_sink else selector, executor)


@kept
def subblock(
    share: Numbers = 0.25,  # released code: a sparsity of 0.75
    *,
    cell: int = 16,  # the same: 4 sub-blocks of a block, on both sides
    block: int = 64,  # the same
    order: Permuter[GlobalPermutation] | None = None,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep a share of a row's blocks: those whose sub-blocks, known by their means, weigh most in sum.

    Args:
        share: share of a row's visible blocks to keep. A number, or one per query head.
        cell: tokens per sub-block.
        block: tokens per block. A multiple of `cell`.
        order: a permuter, such as `HilbertOrder(grid)`. `Identity()`, as in the released code, if None.
        executor: `AutoExecutor()` if None.
    """
    return preset(order, *_by_cells(share, cell, block, normalize=False), executor)


def _by_cells(share: Numbers, cell: int, block: int, *, normalize: bool) -> tuple[AntidiagonalScorer, TopK]:
    """What scores blocks by the means of their cells, and keeps a share of them."""
    a_share.check(share=share)
    block_size.check(cell=cell, block=block)
    multiple("block", block, "cell", cell)
    scorer = AntidiagonalScorer(cell, block=block, pattern="sum", forced=False, normalize=normalize)
    return scorer, TopK(share=share)


@kept
def sol_attn(
    tau: Numbers = 1.0,  # released code; TensorRT-LLM's example has 2.0
    *,
    block: int = 64,  # released code
    variance: Variance = "diagonal",  # the same
    text: int = 0,  # the same: sink_tokens
    mean_correction: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockLogits]:
    """Keep the blocks whose logit lies some standard deviations above their row's mean, and each row's neighbours.

    Blocks that are not kept are left out. The authors' code lets them take part through their mean keys and
    values, as `mean_correction` does. Without it this is the selection alone, with a larger error at the same
    `tau`. Source: Sol-Attn, arXiv 2607.24027.

    Args:
        tau: how many standard deviations. A number, or one per query head. A greater one keeps fewer blocks.
        block: tokens per block.
        variance: how the deviation of a row is computed. `MeanLogitScorer` lists the ways.
        text: how many keys at the end are kept for all queries. `attach` of `hosts.diffusers` keeps text by
            itself.
        mean_correction: let dropped blocks contribute their means, as in `MeanCorrectionExecutor`.
        executor: `AutoExecutor()` if None.
    """
    count.check(text=text)
    neighbours: PositionSelector = Band(1)  # a key at a distance of 1 is in the next block
    rule = MeanStd(tau) | (neighbours | LastKeys(text) if text else neighbours)
    scorer = MeanLogitScorer(block, variance=variance)
    return preset(Identity(), scorer, rule, executor, mean_correction=mean_correction)


@kept
def dfs_attn(
    share: Numbers = 0.3,  # released code, in its first interval of steps
    *,
    cell: int = 16,  # released code; 32 for some models
    block: int = 128,  # released code
    order: Permuter[GlobalPermutation] | None = None,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the share of a row's blocks that hold the most of a softmax over small cells, each known by its means.

    Source: DFSAttn, arXiv 2605.23445.

    Args:
        share: share of a row's visible blocks to keep. A number, or one per query head.
        cell: tokens per cell.
        block: tokens per block. A multiple of `cell`.
        order: `HilbertOrder(grid)`, as the method has it, and `HilbertOrder()` where a host knows the grid. Tokens
            without a grid stay in place (`Identity()`) if None.
        executor: `AutoExecutor()` if None.
    """
    return preset(order, *_by_cells(share, cell, block, normalize=True), executor)


@kept
def radial(
    grid: tuple[int, int, int] | None = None,
    *,
    decay: float = 1.0,  # released code; 0.2 to 1 in its examples
    block: int = 128,  # released code
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first frame, near frames, and of others a window that halves with their distance.

    Source: Radial Attention, arXiv 2506.19852.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens. None where a host knows them.
        decay: the factor of all windows.
        block: tokens per block.
        prefix: tokens of text before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    return preset(Identity(), NoScorer(block), Radial(grid, decay=decay, prefix=prefix), executor)


@kept
def nabla(
    mass: Numbers = 0.9,  # released code
    grid: tuple[int, int, int] | None = None,
    *,
    radius: tuple[int, int, int] = (1, 1, 1),  # released code: windows of 3 tiles; a checkpoint says its own
    tile: tuple[int, int, int] = (1, 8, 8),  # the same
    block: int = 64,  # the same: one tile
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Order cells tile by tile; keep the heaviest pooled blocks, and the tiles around a query's own.

    Source: NABLA, arXiv 2507.13546.

    Args:
        mass: share of the row's pooled mass to keep. A number, or one per query head.
        grid: frames, rows and columns `(T, H, W)` in tokens. None where a host knows them.
        radius: tiles on either side that are always kept. In time, height and width.
        tile: frames, rows and columns of a tile.
        block: tokens per block.
        prefix: tokens of text before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass)
    order = TileOrder(grid, tile, prefix=prefix, suffix=None)
    rule = TopCdf(mass) | TileWindow(grid, radius=radius, tile=tile, prefix=prefix)
    return preset(order, MeanPoolScorer(block), rule, executor)


@kept
def lva(
    grid: tuple[int, int, int] | None = None,
    *,
    period: int,
    radius: int,
    first: int = 1,  # the paper: frame 0 is a permanent anchor
    step: int = 0,
    block: int = 64,
    prefix: int = 0,
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first frames, one frame of every `period`, and a window of frames around a query's own.

    The periodic frames move by one with each denoising step, so that over `period` steps each frame is one of
    them. For a model trained on `C` frames (21 for Wan 2.1) the paper takes `period = ceil(T / (C - (2 radius +
    1)))`. So each query attends to about `C` frames. Source: LVSA, arXiv 2605.31057.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens. None where a host knows them.
        period: distance of periodic frames. All queries see them.
        radius: frames on either side of a query's own. With 0, as released, there is no window.
        first: first frames that all queries see.
        step: the denoising step.
        block: tokens per block.
        prefix: tokens of text before the video. All text is kept.
        executor: `AutoExecutor()` if None.
    """
    size.check(period=period)
    count.check(radius=radius, step=step)
    phase, window = step % period, radius or None
    rule = Frames(grid, period=period, phase=phase, first=first, radius=window, prefix=prefix)
    return preset(Identity(), NoScorer(block), rule, executor)


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

    Source: SVG2, arXiv 2505.18875.

    Args:
        mass: share of the row's pooled mass to keep. A number, or one per query head.
        least: share of a row's blocks that are always kept. The heaviest ones.
        q_clusters: clusters per query head.
        k_clusters: clusters per KV head.
        iterations: steps of k-means.
        block: tokens per block.
        prefix: tokens of text before the video. They stay in place.
        suffix: the same after it.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass, least=least)
    order = KMeansOrder(q_clusters, k_clusters, iterations=iterations, prefix=prefix, suffix=suffix)
    return preset(order, MeanPoolScorer(block), TopCdf(mass) | TopK(share=least), executor)

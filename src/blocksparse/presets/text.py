"""Presets for prompts of text: one function for each paper."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from blocksparse.check.per_head import share
from blocksparse.check.validators import (
    block_size,
    count,
    flag,
    hash_seed,
    multiple,
    optional,
    shown,
    size,
    whole,
)
from blocksparse.execute.executor import Executor
from blocksparse.execute.gather import GatherExecutor
from blocksparse.execute.skip_softmax import SkipSoftmaxExecutor
from blocksparse.layers.schedule import Schedule
from blocksparse.order.content_orders import GlobalIndexMap, SegmentKeySort
from blocksparse.order.permutation import Identity, Permutation
from blocksparse.pipeline import Pipeline
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.score.combined import ScorerPair, ScoresPair
from blocksparse.score.pooled import MeanPoolScorer, RotaryBandScorer, part_of_all
from blocksparse.score.scorer import BlockLogits, BlockMass, BlockScores, NoScorer
from blocksparse.score.strided import (
    AntidiagonalScorer,
    FlattenMaxPoolScorer,
    OutputAwareScorer,
    Pattern,
    QueryRowsScorer,
)
from blocksparse.score.vertical_slash import VerticalSlashScorer, VerticalSlashScores
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.select.combined import OnTiles, Ranked, Refined, SelectorPair, SharedByGroup
from blocksparse.select.mass import GlobalTopCdf, PeakShare, TopCdf
from blocksparse.select.positions import Band, Everything, LastQueries, Random, Sink, Stride
from blocksparse.select.selector import PositionSelector, Selector
from blocksparse.select.top_k import DecayingTopK
from blocksparse.select.vertical_slash import RoutedByDivergence, VerticalSlashCdf, VerticalSlashTopK


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

    In addition, the row's own segment and the block that holds token 0 are always kept. Source: PBS-Attn, arXiv
    2510.21270.

    Args:
        mass: share of the mass outside the row's own segment to keep. A number, or one per query head.
        block: tokens per block.
        S: tokens per segment. A multiple of `block`.
        per_query_head: order keys per query head, as the paper does, not per KV head.
        as_released: choose as the authors' code does. Each query head has an order, not causal, which ignores the
            tail. The mean of a short tail block includes padding.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(S=S)
    flag.check(per_query_head=per_query_head, as_released=as_released)
    multiple("S", S, "block", block)
    each = per_query_head or as_released
    order = SegmentKeySort(S, last_q=block, per_query_head=each, causal_last_q=not as_released)
    return preset(order, MeanPoolScorer(block, padded_tail=as_released), TopCdf(mass) | Sink(1), executor)


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

    In addition, the row's own segment and the block that holds token 0 are always kept. Source: PBS-Attn+, arXiv
    2510.21270, appendix B.2.

    Args:
        mass: share of the mass outside the row's own segment to keep. A number, or one per query head.
        stride: side of the cells of pairs. Their antidiagonals are scored.
        block: tokens per block. A multiple of `stride`.
        S: tokens per segment. A multiple of `block`.
        per_query_head: order keys per query head, as the paper does, not per KV head.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(S=S)
    multiple("S", S, "block", block)
    order = SegmentKeySort(S, last_q=block, per_query_head=per_query_head)
    scorer = AntidiagonalScorer(stride, block=block, forced=False)
    return preset(order, scorer, TopCdf(mass) | Sink(1), executor)


@kept
def mean_pooling(
    mass: Numbers = 0.9,  # section 4.1
    *,
    block: int = 128,  # section 4.1
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the heaviest pooled blocks and, in addition, always the first block and the diagonal.

    Source: the baseline of PBS-Attn, arXiv 2510.21270, section 4.1.

    Args:
        mass: share of the row's pooled mass to keep. A number, or one per query head.
        block: tokens per block.
        as_released: include padding in the mean of a short tail block.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    return preset(Identity(), MeanPoolScorer(block, padded_tail=as_released), TopCdf(mass) | Sink(), executor)


@kept
def bfla(
    mass: Numbers = 0.99,  # gamma; section 4.5, the "strong operating point"
    *,
    block: int = 256,  # b; section 4.5
    g: int = 64,  # section 3.3; table 5
    tile: int = 64,  # T, the tile of the paper's kernel, is 32 in its code; our kernels are fast from 64 on
    n_local: int | None = None,
    n_local_tiles: int | None = None,
    sink: int = 32,  # eq. 16: the first tile, which has 32 tokens in the released code
    eta: int | None = 16,  # section 4.5
    rho: Numbers | None = None,  # section 4.5: rho = 0
    seed: int = 1,  # released code; the paper names none
    per_token: bool = False,
    coarse_rescue: bool = False,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the heaviest coarse blocks for all query heads of a KV head, then also keep tiles by position.

    A tile is a block of the final mask. A rescue keeps tiles that the scores dropped: one of every `eta`, or
    random ones. The local band, the sink and both rescues are added to the blocks that `mass` asks for, and are
    not counted.

    Args:
        mass: share of a row's block mass to keep. A number, or one per query head.
        block: tokens per coarse block.
        g: tokens per group that is compared as one vector. Divides `block`.
        tile: tokens per tile. Divides `block`.
        n_local: tokens in the local band. Tiles with a key at most so far before a query of the row are kept.
            `None` is 256 (8 tiles of 32; table 5).
        n_local_tiles: the same in tiles of `tile` tokens.
        sink: first tokens whose tiles are kept.
        eta: keep every `eta`-th tile. None for no stride rescue.
        rho: keep a tile with this probability, a number or one per query head. None for no random rescue.
        seed: seed of both rescues.
        per_token: divide the products of groups by their tokens. The softmax over blocks is then not one-hot.
        coarse_rescue: apply band, sink and rescues to coarse blocks, not to tiles.
        as_released: choose as the authors' code does. The choice is equal for chunks that start at a block. This
            includes `coarse_rescue`. Rescues use linear hashes, with rows counted from the start of the chunk. The
            band has at least one block, and scores include padding.
        executor: `AutoExecutor()` if None.

    Raises:
        ValueError: `n_local` and `n_local_tiles` are both given, or `tile` does not divide `block`.
    """
    block_size.check(block=block, tile=tile)
    block, tile = whole(block), whole(tile)
    multiple("block", block, "tile", tile)
    optional(count).check(n_local=n_local, n_local_tiles=n_local_tiles)
    size.check(sink=sink)
    hash_seed.check(seed=seed)
    flag.check(coarse_rescue=coarse_rescue, as_released=as_released)
    if n_local is not None and n_local_tiles is not None:
        raise ValueError(f"give 'n_local' or 'n_local_tiles', not both: {n_local} and {n_local_tiles}")
    if n_local is None:
        n_local = 256 if n_local_tiles is None else whole(n_local_tiles) * tile  # table 5: 8 tiles of 32
    rescue: PositionSelector = Band(max(n_local, 1) if as_released else n_local) | Sink(sink)
    if eta is not None:
        rescue = rescue | Stride(eta, seed, released=as_released)
    if rho is not None:
        rescue = rescue | Random(rho, seed, released=as_released)

    n = block // tile
    selector: Selector[BlockMass, BlockMask]
    if coarse_rescue or as_released:
        selector = Refined(SharedByGroup(TopCdf(mass) | rescue), n)
    else:
        selector = Refined(SharedByGroup(TopCdf(mass)), n) | OnTiles(rescue, n)
    scorer = FlattenMaxPoolScorer(block, g, per_token=per_token, padded_tail=as_released)
    return preset(Identity(), scorer, selector, executor)


@kept
def s2o(
    tau: Numbers | None = None,
    *,
    S: int = 256,  # measured, see docs/reference/papers/s2o.md; the paper prints no value
    block: int = 64,  # the paper prints no value (algorithm 2 names tiles B_M and B_N)
    prefix: int | None = 8192,  # algorithm 1 ranks all earlier keys, as None does
    coarse: bool = True,  # equation 2 orders exactly, as False does
    per_query_head: bool = True,  # algorithm 1 has H heads of q and of k
    order_queries: bool = True,  # section 3.1 (i)
    band: int = 0,  # the paper has none
    executor: Executor[Permutation, RankedBlockMask] | None = None,
) -> Pipeline[Permutation, BlockScores, RankedBlockMask]:
    """Attend to the keys of a row's own segment, then to earlier keys, best first, and stop early.

    Earlier keys are sorted by their product with the mean query of the segment.

    Args:
        tau: a row stops after a block that adds less than this share to its softmax denominators. A number, or one
            per query head. If None it is 0.01. The paper prints no value.
        S: tokens per segment. A multiple of `block`. Larger segments need fewer index maps, but a row's own
            segment is always computed, so the density cannot be lower than its share.
        block: tokens per block, on both sides. A row of blocks stops as a whole.
        prefix: how many of the earlier keys a map holds, the best ones. A row attends to no others, even if it has
            not stopped by then. At 16384 tokens the default adds almost no error to that of a `tau` of 0.01, but
            much to that of a smaller `tau` (page s2o of the papers). `GlobalIndexMap` has the memory of maps.
        coarse: order the earlier keys by rounded scores. This takes no full sort on a GPU and adds almost no error
            (docs/reference/papers/s2o.md).
        per_query_head: order keys per query head.
        order_queries: sort the queries of a segment. Similar ones then stop together.
        band: visit the keys up to so many before each query in any case. Without a band (0) a query at the start
            of its segment may miss them. Give it a multiple of `block`, since whole blocks are visited. What it
            is worth is in docs/reference/papers/s2o.md.
        executor: `GatherExecutor(tau)` if None. An executor that does not stop early, such as
            `ReferenceExecutor`, computes every block.

    Raises:
        ValueError: both `tau` and `executor` are given, or `S` is not a multiple of `block`.
    """
    if executor is not None and tau is not None:
        raise ValueError(
            f"'tau' belongs to the executor, and one is given. Use s2o(executor=GatherExecutor({shown(tau)}))."
        )
    block_size.check(S=S, block=block)
    count.check(band=band)
    multiple("S", S, "block", block)
    order = GlobalIndexMap(
        S, prefix=prefix, coarse=coarse, per_query_head=per_query_head, order_queries=order_queries, near=band
    )
    if executor is None:
        executor = GatherExecutor(0.01 if tau is None else tau)
    return Pipeline(order, NoScorer(block), Ranked(Everything(), first=Band(band) if band else None), executor)


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

    The first block and the diagonal are counted in that share. Source: XAttention, arXiv 2503.16428.

    Args:
        mass: share of the row's mass to keep. A number, or one per query head.
        stride: side of the cells of pairs. Their antidiagonals are scored.
        block: tokens per block. A multiple of `stride`.
        pattern: which pairs of a cell are scored. `AntidiagonalScorer` lists the patterns.
        as_released: fill a short tail cell with zeros, as the authors' code does. Errors in its selection are not
            copied.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    scorer = AntidiagonalScorer(stride, block=block, pattern=pattern, padded_tail=as_released)
    return preset(Identity(), scorer, TopCdf(mass), executor)


@kept
def flex_prefill(
    mass: Numbers = 0.95,  # the authors' runs: Llama 3.1 and GLM-4; 0.9 for Yi and Qwen2
    tau: Numbers = 0.1,  # the authors' runs
    *,
    block: int = 128,  # the authors' runs
    min_budget: int = 1024,  # the authors' runs
    max_budget: int | None = None,
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[VerticalSlashScores]:
    """Keep pooled blocks in heads that pooling describes well, and columns and diagonals in the others.

    The paper calls the first kind of head query-aware. The block of token 0 and the diagonal are always kept,
    outside the budgets. Source: FlexPrefill, arXiv 2502.20766.

    Args:
        mass: gamma of the paper, the share of the attention mass to keep. A number, or one per query head.
        tau: divergence below which a head is query-aware. A number, or one per query head. With 0 no head is.
        block: tokens per block. Also the number of last queries that are measured.
        min_budget: the least number of tokens in the columns, and in the diagonals. It holds in every head.
        max_budget: the greatest number in each, in heads that are not query-aware. None for no limit.
        as_released: choose as the authors' code does. It keeps one block for every 128 tokens that it counts, and
            takes forced blocks out of the budget. It keeps one diagonal of blocks per band. In query-aware heads
            it drops the block with which the sum reaches `mass`.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    floor = VerticalSlashCdf(0.0, min_budget=min_budget, released=as_released)
    similar = GlobalTopCdf(mass, crossing=not as_released) | floor
    otherwise = VerticalSlashCdf(mass, min_budget=min_budget, max_budget=max_budget, released=as_released)
    rule = RoutedByDivergence(tau, similar=similar, otherwise=otherwise)
    return preset(Identity(), VerticalSlashScorer(block, tau=tau), rule, executor)


@kept
def minference(
    vertical: int | Sequence[int] | Tensor = 1000,  # released code, for heads that its table of budgets lacks
    slash: int | Sequence[int] | Tensor = 6096,  # the same
    *,
    sink: int = 30,  # released code
    recent: int = 100,  # released code; its search for budgets forces 30
    block: int = 64,  # section 3.2; released code
    last_q: int = 64,  # section 3.2, algorithm 1
    as_released: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[VerticalSlashScores]:
    """Keep a fixed number of columns and diagonals, the heaviest for the last queries.

    Source: MInference 1.0, arXiv 2407.02490.

    Args:
        vertical: how many keys (columns). A number, or one per query head.
        slash: how many distances (diagonals). A number, or one per query head.
        sink: first keys that are always kept. They count in `vertical`.
        recent: nearest distances that are always kept. They count in `slash`.
        block: tokens per block.
        last_q: last queries by which the lines are measured.
        as_released: choose as the authors' code does. Keys near the end may use up the vertical budget, and tiles
            of keys at chosen distances end up to one block late.
        executor: `AutoExecutor()` if None.
    """
    flag.check(as_released=as_released)
    rule = VerticalSlashTopK(vertical, slash, sink=sink, recent=recent, released=as_released)
    return preset(Identity(), VerticalSlashScorer(block, last_q=last_q, pooled=False), rule, executor)


@kept
def a_shape(
    sink: int = 128,  # n_init in the released code of MInference
    local: int = 3968,  # n_local in the same code
    *,
    block: int = 64,  # the same code
    executor: BlockExecutor | None = None,
) -> Preset[BlockScores]:
    """Keep the first `sink` keys and the last `local` ones, a query's own included.

    Blocks that hold any of these keys are kept whole, so a query may see up to two blocks of keys more. Source:
    StreamingLLM's pattern; MInference, arXiv 2407.02490.

    Args:
        sink: tokens kept at the start of the prompt.
        local: tokens in the window that ends with the query. At least 1.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    size.check(sink=sink, local=local)
    return preset(Identity(), NoScorer(block), Sink(sink) | Band(local - 1), executor)


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
    key for all its queries. So up to one more block of queries is dense.

    Args:
        sink: tokens kept at the start of the prompt.
        local: tokens in the window that ends with the query. At least 1.
        last: queries at the end of the call that see every key.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    size.check(sink=sink, local=local, last=last)
    return preset(Identity(), NoScorer(block), Sink(sink) | Band(local - 1) | LastQueries(last), executor)


@kept
def triangle_mix(
    starting_layer: int,
    sink: int = 128,  # this and the others as in `tri_shape`: the released code runs the same kernel
    local: int = 3968,
    last: int = 100,
    *,
    block: int = 64,
    executor: BlockExecutor | None = None,
) -> Schedule:
    """A schedule: dense before `starting_layer`, then the first and the last keys, and dense last queries.

    Source: TriangleMix, arXiv 2507.21526.

    Args:
        starting_layer: index of the first sparse layer. It depends on the model.
        sink: tokens kept at the start of the prompt.
        local: tokens in the window that ends with the query. At least 1.
        last: queries at the end of the call that see every key.
        block: tokens per block.
        executor: `AutoExecutor()` if None.
    """
    count.check(starting_layer=starting_layer)
    return Schedule(tri_shape(sink, local, last, block=block, executor=executor), dense=range(int(starting_layer)))


@kept
def flash_prefill(
    alpha: Numbers = 0.12,  # released code, for Qwen3-30B-A3B; 0.08 to 0.22 for others
    *,
    block: int = 128,  # released code
    sink: int = 256,  # the same: 2 blocks
    window: int = 512,  # the same: 4 blocks
    last: int | None = 256,  # the same: 2 blocks
    mean_correction: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the blocks that are worth a share of their row's best one, the first keys, a window, and the last rows.

    A block is judged by the weights that the single queries of a row give to its mean key. Source: FlashPrefill,
    arXiv 2603.06199.

    Args:
        alpha: share of the row's greatest mass from which on a block is kept. A number, or one per query head.
        block: tokens per block.
        sink: first tokens whose blocks are kept.
        window: tokens of a window that ends with a row. In whole blocks, with the row's own.
        last: queries at the end of the call that see every key. None for none. Each chunk of a prompt has its
            own last queries.
        mean_correction: let dropped blocks contribute their means, as in FlashPrefill V2 (2608.19758) and
            `MeanCorrectionExecutor`.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(sink=sink, window=window)
    optional(size).check(last=last)
    kept: PositionSelector = Sink(sink) | Band(max(window - block, 0))
    if last is not None:
        kept = kept | LastQueries(last)
    rule = PeakShare(alpha) | kept
    return preset(Identity(), QueryRowsScorer(block), rule, executor, mean_correction=mean_correction)


@kept
def prism(
    mass: Numbers = 0.95,  # released code, for both bands
    *,
    block: int = 128,  # released code
    fast: tuple[float, float] = (0.0, 0.5),  # the same: the 64 fastest of 128 channels
    slow: tuple[float, float] = (0.25, 1.0),  # the same: the 96 slowest
    temperature: float | None = None,  # the same: calibrated
    executor: BlockExecutor | None = None,
) -> Preset[ScoresPair[BlockMass, BlockMass]]:
    """Keep the heaviest pooled blocks of the fast channels and those of the slow ones, the first and the diagonal.

    Source: Prism, arXiv 2602.08426.

    Args:
        mass: share of the row's pooled mass to keep in each band. A number, or one per query head.
        block: tokens per block.
        fast: begin and end of the band of fast channels. Shares of all pairs of channels.
        slow: the same of the slow ones.
        temperature: divisor of the logits of both bands. None measures it per head and call, as in
            `RotaryBandScorer`. Chunking then changes the choice a little.
        executor: `AutoExecutor()` if None.
    """
    share.check(mass=mass)
    part_of_all.check(fast=fast, slow=slow)
    of_fast, of_slow = (RotaryBandScorer(band, block, temperature=temperature) for band in (fast, slow))
    rule = SelectorPair(TopCdf(mass), TopCdf(mass)) | Sink()
    return preset(Identity(), ScorerPair(of_fast, of_slow), rule, executor)


@kept
def stem(
    decay: float = 0.7,  # released configuration, for Qwen3-8B
    *,
    k: int | None = None,  # released code: by the number of blocks
    weight: float = 0.2,  # the same
    lengths: tuple[float, float] | None = None,  # the same: measured
    stride: int = 8,  # the same
    block: int = 128,  # the same
    sink: int = 512,  # the same: 4 blocks
    window: int = 512,  # the same: 4 blocks
    executor: BlockExecutor | None = None,
) -> Preset[BlockLogits]:
    """Keep fewer of the best blocks the later a row is, where long values count, the first keys and a window.

    The released code keeps the first two layers dense: `Schedule(stem(), dense=(0, 1))`. Source: Stem, arXiv
    2603.06274.

    Args:
        decay: the share of `k` that the last row of a prompt keeps.
        k: how many blocks a row keeps before the number falls. None for the rule of `DecayingTopK`.
        weight: what a deviation of the logs of value lengths adds to a block's logit.
        lengths: mean and deviation of these logs. None measures them per head and call. Chunking then changes the
            choice a little.
        stride: side of the cells of pairs. Their antidiagonals are scored.
        block: tokens per block.
        sink: first tokens whose blocks are kept.
        window: tokens of a window that ends with a row. In whole blocks, with the row's own.
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(sink=sink, window=window)
    scorer = OutputAwareScorer(stride, block=block, weight=weight, lengths=lengths)
    rule = DecayingTopK(k, decay) | (Sink(sink) | Band(max(window - block, 0)))
    return preset(Identity(), scorer, rule, executor)


@kept
def skip_softmax(
    scale_factor: float | None = None, *, block: int = 128, executor: BlockExecutor | None = None
) -> Preset[BlockScores]:
    """Choose nothing before attention; leave out tiles of keys by a threshold that falls with the prompt's length.

    Source: BLASST, arXiv 2512.12087.

    Args:
        scale_factor: a tile is left out if its weights are below `scale_factor / N` of the greatest one so far. If
            None it is 1000, as in TensorRT-LLM's examples.
        block: tokens per block.
        executor: `SkipSoftmaxExecutor(scale_factor)` if None. `SkipSoftmaxExecutor.calibrated(config)` has the
            factor of a checkpoint that ModelOpt calibrated. An executor that leaves out nothing, such as
            `ReferenceExecutor`, attends densely.

    Raises:
        ValueError: both `scale_factor` and `executor` are given.
    """
    if executor is not None and scale_factor is not None:
        raise ValueError(
            "'scale_factor' belongs to the executor, and one is given. Use "
            f"skip_softmax(executor=SkipSoftmaxExecutor({shown(scale_factor)}))."
        )
    if executor is None:
        executor = SkipSoftmaxExecutor(1000.0 if scale_factor is None else scale_factor)
    return preset(Identity(), NoScorer(block), Everything(), executor)

"""FlashPrefill: Instantaneous Pattern Discovery and Thresholding (arXiv 2603.06199)."""

from __future__ import annotations

from blocksparse.checks.validators import a, block_size, flag, optional, size
from blocksparse.executors.auto import AutoExecutor
from blocksparse.executors.executor import Executor
from blocksparse.executors.remainder import RemainderExecutor
from blocksparse.permuters.identity import Identity
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.query_rows import QueryRowsScorer
from blocksparse.selectors.band import Band
from blocksparse.selectors.last_queries import LastQueries
from blocksparse.selectors.peak_share import PeakShare
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.sink import Sink


@kept
def flash_prefill(
    alpha: Numbers = 0.12,  # released code, for Qwen3-30B-A3B; 0.08 to 0.22 for others
    *,
    block: int = 128,  # released code
    sink: int = 256,  # the same: 2 blocks
    window: int = 512,  # the same: 4 blocks
    last: int | None = 256,  # the same: 2 blocks
    remainder: bool = False,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the blocks that are worth a share of their row's best one, the first keys, a window, and the last rows.

    A block is judged by the weights that the single queries of a row give to its mean key.

    Args:
        alpha: share of the row's greatest mass from which on a block is kept; a number, or one per query head.
        block: tokens per block.
        sink: tokens at the start of the prompt whose blocks are kept.
        window: tokens in the window that ends with a row of blocks, in whole blocks, the row's own included.
        last: how many queries at the end of the call see every key; None for none. Each chunk of a prompt has its
            own last queries.
        remainder: let dropped blocks contribute their means, as in `RemainderExecutor`: the mean
            correction of FlashPrefill V2 (2608.19758).
        executor: `AutoExecutor()` if None.
    """
    block_size.check(block=block)
    size.check(sink=sink, window=window)
    optional(size).check(last=last)
    flag.check(remainder=remainder)
    optional(a(Executor)).check(executor=executor)
    attend = AutoExecutor() if executor is None else executor
    kept: PositionSelector = Sink(sink) | Band(max(window - block, 0))
    if last is not None:
        kept = kept | LastQueries(last)
    return preset(
        Identity(),
        QueryRowsScorer(block),
        PeakShare(alpha) | kept,
        RemainderExecutor(attend) if remainder else attend,
    )

"""SubBlock: the sparse attention of SGLang for video, by sums over sub-blocks."""

from __future__ import annotations

from blocksparse.checks.per_head import share as a_share
from blocksparse.checks.validators import block_size, multiple
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter
from blocksparse.presets.preset import BlockExecutor, Numbers, Preset, kept, preset
from blocksparse.scorers.antidiagonal import AntidiagonalScorer
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.top_k import TopK


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
        share: share of a row's reachable blocks to keep; a number, or one per query head.
        cell: tokens per sub-block.
        block: tokens per block, a multiple of `cell`.
        order: a permuter, such as `HilbertOrder(grid)`; `Identity()`, as in the released code, if None.
        executor: `AutoExecutor()` if None.
    """
    a_share.check(share=share)
    block_size.check(cell=cell, block=block)
    multiple("block", block, "cell", cell)
    return preset(
        order,
        AntidiagonalScorer(cell, block=block, pattern="sum", forced=False, normalize=False),
        TopK(share=share),
        executor,
    )

"""DFSAttn: video attention by sums of cells along a space-filling curve (arXiv 2605.23445)."""

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
def dfs_attn(
    share: Numbers = 0.3,  # released code, in its first interval of steps
    *,
    cell: int = 16,  # released code; 32 for some models
    block: int = 128,  # released code
    order: Permuter[GlobalPermutation] | None = None,
    executor: BlockExecutor | None = None,
) -> Preset[BlockMass]:
    """Keep the share of a row's blocks that hold the most of a softmax over small cells, each known by its means.

    Args:
        share: share of a row's reachable blocks to keep; a number, or one per query head.
        cell: tokens per cell.
        block: tokens per block, a multiple of `cell`.
        order: `HilbertOrder(grid)`, as the method has it, and `HilbertOrder()` where a host knows the grid; tokens
            without a grid stay in place (`Identity()`) if None.
        executor: `AutoExecutor()` if None.
    """
    a_share.check(share=share)
    block_size.check(cell=cell, block=block)
    multiple("block", block, "cell", cell)
    return preset(
        order,
        AntidiagonalScorer(cell, block=block, pattern="sum", forced=False),
        TopK(share=share),
        executor,
    )

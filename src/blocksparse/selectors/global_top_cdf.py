"""Keep the smallest set of blocks that holds a share of a whole head's mass (FlexPrefill, arXiv 2502.20766)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen, validators

from blocksparse.kernels.running_share import running_share
from blocksparse.per_head import PerHead, check, over_blocks, per_head
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import Selector


@final
@frozen(eq=False)
class GlobalTopCdf(Selector[BlockMass, BlockMask]):
    """Take the heaviest blocks of all rows of a head together, until `mass` of their total is reached.

    One budget serves the whole head, so a row may keep much more or much less than `mass` of its own; `TopCdf`
    gives each row what it asks for. Later rows compete with earlier ones: the choice is not causal, and
    depends on how a prompt is chunked. Forced blocks are kept but not counted. Sorting takes about 45 bytes
    per block: 1.5 GB for 32 heads of 1024 x 1024 blocks.

    Args:
        mass: share of the head's total mass, in (0, 1]; a number, or one per query head. 1 keeps every
            reachable block.
        crossing: keep the block that takes the sum over the target, as the paper's algorithm; the released
            code drops it.
    """

    mass: PerHead = field(
        default=0.95, converter=per_head, validator=check("in (0, 1]", lambda x: (x > 0) & (x <= 1))
    )
    crossing: bool = field(default=True, kw_only=True, validator=validators.instance_of(bool))

    def __call__(self, scores: BlockMass) -> BlockMask:
        grid = scores.grid
        mass, reachable = over_blocks(self.mass, scores.values), grid.reachable
        share = running_share(scores.values.masked_fill(~reachable, 0.0).flatten(2))  # [B, Hq, rows * cols]
        target = mass[..., 0].float()
        taken = share.before < target if self.crossing else share.after <= target
        keep = share.put_back(taken).unflatten(-1, scores.values.shape[2:])
        always = grid.diagonal if scores.forced is None else grid.diagonal | scores.forced
        return BlockMask((keep | always | (mass >= 1)) & reachable, grid)

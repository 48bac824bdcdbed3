"""Rules that keep a share of the mass: of a row, of a head, or of a row's best block."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.check.per_head import PerHead, least, number_or_blocks, over_blocks, per_head, positive, share
from blocksparse.check.validators import flag
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.masks.grid import NO_BLOCKS, AlwaysKept
from blocksparse.kernels.select.global_top_cdf import global_top_cdf
from blocksparse.kernels.select.top_cdf import row_share, top_cdf
from blocksparse.score.scorer import BlockMass
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import Selector, SelectorTraits


@final
@frozen(cache_hash=True)
class TopCdf(Selector[BlockMass, BlockMask]):
    """Take forced blocks first, then the heaviest, until `mass` of the row's total is reached.

    Masses are rounded to integers before they are added, so the sums do not depend on the order of summation. The
    same scores give the same mask on every device.

    Args:
        mass: share of the row's total mass, in (0, 1]. A number, or one per query head. 1 keeps every
            visible block.
        crossing: keep the block with which the sum reaches the target (PBS-Attn algorithm 2, BFLA, XAttention).
            With `False` a block is taken only if the sum stays within the target, as in SpargeAttn. The heaviest
            block that is not forced is always kept.
    """

    mass: PerHead = field(default=0.9, converter=per_head, validator=share)
    crossing: bool = field(default=True, validator=flag, kw_only=True)

    traits = SelectorTraits(always=True)
    by_row = True

    def __call__(self, scores: BlockMass, *, always: AlwaysKept = NO_BLOCKS) -> BlockMask:
        values, grid, mass = scores.values, scores.grid, number_or_blocks(self.mass, scores.values)
        keep = top_cdf(values, scores.forced, mass, grid, crossing=self.crossing, always=always)
        return BlockMask(keep, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1


@final
@frozen(cache_hash=True)
class GlobalTopCdf(Selector[BlockMass, BlockMask]):
    """Take the heaviest blocks of all rows of a head together, until `mass` of their total is reached.

    The whole head has one budget, so a row may keep much more or much less than the share `mass` of its total. In
    contrast, `TopCdf` has a budget for each row. Earlier rows compete with later ones, so the choice is not causal
    and depends on how a prompt is chunked. Forced blocks are kept in any case, but are not counted first: they are
    ranked and counted like all others. The search on a GPU takes 5 bytes per block; the sort on other devices
    takes about 45. Source: FlexPrefill, arXiv 2502.20766.

    Args:
        mass: share of the head's total mass, in (0, 1]. A number, or one per query head. 1 keeps every
            visible block.
        crossing: keep the block with which the sum reaches the target, as the paper's algorithm does. The released
            code drops it.
    """

    mass: PerHead = field(default=0.95, converter=per_head, validator=share)
    crossing: bool = field(default=True, kw_only=True, validator=flag)

    traits = SelectorTraits(heads=True)
    by_row = "has one budget for all rows of a call, and a part has some rows"

    def __call__(self, scores: BlockMass, *, heads: Heads = None) -> BlockMask:
        mass = over_blocks(self.mass, scores.values)
        keep = global_top_cdf(scores.values, scores.forced, mass, scores.grid, crossing=self.crossing, heads=heads)
        return BlockMask(keep, scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return least(self.mass) >= 1


@final
@frozen(cache_hash=True)
class PeakShare(Selector[BlockMass, BlockMask]):
    """Keep blocks with at least the share `alpha` of their row's greatest mass, forced blocks, and the diagonal.

    It takes neither a sort nor a running sum. A block without mass is not kept, even where no block of a row has
    any. How much of the row's mass is kept depends on how it is spread: of `n` equal blocks all are. Source:
    FlashPrefill, arXiv 2603.06199, section 3.4.

    Args:
        alpha: share of the row's greatest mass, in (0, 1]. A number, or one per query head. At 1 the best block
            is kept, and blocks that equal it.
    """

    alpha: PerHead = field(converter=per_head, validator=share)

    traits = SelectorTraits(always=True)
    by_row = True

    def __call__(self, scores: BlockMass, *, always: AlwaysKept = NO_BLOCKS) -> BlockMask:
        alpha = number_or_blocks(self.alpha, scores.values)
        keep = row_share(scores.values, scores.forced, alpha, scores.grid, of="peak", always=always)
        return BlockMask(keep, scores.grid)


@final
@frozen(cache_hash=True)
class RowShare(Selector[BlockMass, BlockMask]):
    """Keep blocks that hold at least `alpha / sqrt(n)` of their row's mass, of a row that can see `n` blocks.

    Forced blocks and the diagonal are kept as well. Rows whose mass is concentrated keep few blocks, and rows
    whose mass is spread keep many. `TopCdf` leaves out the same mass in each row instead. At equal density
    `RowShare` leaves out less mass in all. The root lets one `alpha` serve prompts of 4K to 128K tokens.

    Args:
        alpha: a finite number greater than 0, or one per query head. A greater one keeps fewer blocks. Above
            `sqrt(n)` a row keeps only its diagonal and forced blocks.
    """

    alpha: PerHead = field(converter=per_head, validator=positive)

    traits = SelectorTraits(always=True)
    by_row = True

    def __call__(self, scores: BlockMass, *, always: AlwaysKept = NO_BLOCKS) -> BlockMask:
        alpha = number_or_blocks(self.alpha, scores.values)
        keep = row_share(scores.values, scores.forced, alpha, scores.grid, of="row", always=always)
        return BlockMask(keep, scores.grid)

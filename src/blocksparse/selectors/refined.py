"""The same choice on finer blocks (BFLA, section 3.3)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.selectors.any_of import AnyOf
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.on_tiles import OnTiles
from blocksparse.selectors.places import NOWHERE
from blocksparse.selectors.position_selector import PositionSelector
from blocksparse.selectors.selector import ScoresT_contra, Selector
from blocksparse.validators import a, optional, size, whole


@final
@frozen(eq=False)
class Refined(Selector[ScoresT_contra, BlockMask]):
    """What `inner` keeps, cut into blocks `n` times smaller on both sides; unreachable ones fall away.

    Args:
        rescue: a rule of position whose finer blocks are kept too: `Refined(a, n) | OnTiles(rescue, n)` in one go,
            shared by the heads that share the mask of `inner`.
    """

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    n: int = field(converter=whole, validator=size)
    rescue: PositionSelector | None = field(default=None, kw_only=True, validator=optional(a(PositionSelector)))

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        mask, grid = self.inner(scores), scores.grid
        if self.rescue is None:
            return mask.refine(self.n)
        shared = mask.keep.shape[1] != grid.q_heads
        places, others = self.rescue.parts()
        if shared and grid.shared() is not grid:  # heads of a group differ in what the rule keeps
            places, others = NOWHERE, (self.rescue,)
        mask = mask.refine(self.n, places)
        if not others:
            return mask
        rescued = OnTiles(AnyOf(others), grid.q_block // mask.grid.q_block)(scores)
        return mask | (rescued.share_heads() if shared else rescued)

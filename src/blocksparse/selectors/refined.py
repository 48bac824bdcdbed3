"""The same choice on finer blocks (BFLA, section 3.3)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen, validators

from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import ScoresT_contra, Selector


@final
@frozen(eq=False)
class Refined(Selector[ScoresT_contra, BlockMask]):
    """What `inner` keeps, cut into blocks `n` times smaller on both sides; unreachable ones fall away."""

    inner: Selector[ScoresT_contra, BlockMask]
    n: int = field(validator=[validators.instance_of(int), validators.gt(0)])

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.inner(scores).refine(self.n)

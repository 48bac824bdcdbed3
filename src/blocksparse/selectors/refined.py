"""A choice of blocks, cut into smaller blocks (BFLA, section 3.3)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a, size, whole
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import ScoresT_contra, Selector


@final
@frozen(cache_hash=True)
class Refined(Selector[ScoresT_contra, BlockMask]):
    """Keep what `inner` keeps, cut into blocks `n` times smaller on both sides, without unreachable ones.

    `Refined(a, n) | OnTiles(rule, n)` also keeps the smaller blocks that `rule` keeps by their positions.
    """

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    n: int = field(converter=whole, validator=size)

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.inner(scores).refine(self.n)

    def reads_beyond(self, tau: PerHead) -> bool:
        return self.inner.reads_beyond(tau)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.inner.keeps_everything(M, N, causal=causal)

    def alignment(self, causal: bool) -> int:
        return self.inner.alignment(causal)

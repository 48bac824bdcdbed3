"""One mask per KV head (BFLA, eq. 14)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.selectors.selector import ScoresT_contra, Selector


@final
@frozen(cache_hash=True)
class SharedByGroup(Selector[ScoresT_contra, BlockMask]):
    """Keep for a whole group of query heads what `inner` keeps for any of them (BFLA, eq. 14)."""

    inner: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.inner(scores).share_heads()

    def reads_beyond(self, tau: PerHead) -> bool:
        return self.inner.reads_beyond(tau)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.inner.keeps_everything(M, N, causal=causal)

    def alignment(self, causal: bool) -> int:
        return self.inner.alignment(causal)

"""`UpTo` uses a selector in calls of at most so many keys, and keeps everything in longer ones."""

from __future__ import annotations

from typing import Any, cast, final

import attrs
from attrs import field, frozen

from blocksparse.check.per_head import PerHead
from blocksparse.check.validators import a, size, whole
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.positions import Everything, PositionSelector
from blocksparse.select.selector import ScoresT_contra, Selector
from blocksparse.select.vertical_slash import VerticalSlashTopK


@final
@frozen(repr=False, cache_hash=True)
class UpTo(Selector[ScoresT_contra, BlockMask]):
    """Keep what `rule` keeps in calls of at most `tokens` keys, and every block in longer calls."""

    rule: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    tokens: int = field(converter=whole, validator=size)

    def __repr__(self) -> str:
        return f"UpTo({self.rule!r}, {self.tokens})"

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.rule(scores) if scores.grid.k_len <= self.tokens else Everything().on(scores.grid)

    def reads_beyond(self, tau: PerHead) -> bool:
        return self.rule.reads_beyond(tau)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens < N or self.rule.keeps_everything(M, N, causal=causal)


def has_fixed_budget(selector: Selector[Any, Any]) -> bool:
    """Whether a selector keeps a fixed number of tokens or blocks, as windows do."""
    if isinstance(selector, PositionSelector | VerticalSlashTopK):
        return not isinstance(selector, Everything)
    parts = (getattr(selector, each.name) for each in attrs.fields(cast(Any, type(selector))))
    if selectors := [part for part in parts if isinstance(part, Selector)]:
        return all(map(has_fixed_budget, selectors))
    return getattr(selector, "k", None) is not None

"""One of two selectors, by whether the call is causal."""

from __future__ import annotations

from typing import final

from attrs import field, frozen

from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.selectors.selector import MaskT_co, ScoresT_contra, Selector


@final
@frozen(cache_hash=True)
class SelectorByCausality(Selector[ScoresT_contra, MaskT_co]):
    """Choose by `causal` in a causal call, as for text, and by `otherwise` in another, as for images and video."""

    causal: Selector[ScoresT_contra, MaskT_co] = field(validator=a(Selector))
    otherwise: Selector[ScoresT_contra, MaskT_co] = field(validator=a(Selector))

    def __call__(self, scores: ScoresT_contra) -> MaskT_co:
        return (self.causal if scores.grid.causal else self.otherwise)(scores)

    def reads_beyond(self, tau: PerHead) -> bool:
        return any(rule.reads_beyond(tau) for rule in (self.causal, self.otherwise))

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return (self.causal if causal else self.otherwise).keeps_everything(M, N, causal=causal)

    def alignment(self, causal: bool) -> int:
        return (self.causal if causal else self.otherwise).alignment(causal)

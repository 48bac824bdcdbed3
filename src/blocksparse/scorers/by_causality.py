"""One of two scorers, by whether the call is causal."""

from __future__ import annotations

from typing import Self, final

from attrs import evolve, field, frozen
from torch import Tensor

from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import PermutationT_contra, Scorer, ScoresT_co
from blocksparse.validators import a


@final
@frozen(eq=False)
class ScorerByCausality(Scorer[PermutationT_contra, ScoresT_co]):
    """Score by `causal` in a causal call, as for text, and by `otherwise` in another, as for images and video.

    Only the one that is taken is computed. Each may cut the call into blocks of its own; `SelectorByCausality`
    chooses among them. A sliding window is that of `causal`, since windows are causal, and so is what it says of
    histories, since prompts are read in chunks where calls are causal.
    """

    causal: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))
    otherwise: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))

    @property
    def window(self) -> int | None:
        return self.causal.window

    def in_window(self, window: int | None) -> Self:
        return evolve(self, causal=self.causal.in_window(window))

    def __call__(
        self, q: Tensor, k: Tensor, permutation: PermutationT_contra, *, causal: bool, scale: float
    ) -> ScoresT_co:
        return self._taken(causal)(q, k, permutation, causal=causal, scale=scale)

    @property
    def keeps_history(self) -> bool:
        return self.causal.keeps_history

    def with_history(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        history: KeyHistory,
        *,
        causal: bool,
        scale: float,
    ) -> ScoresT_co:
        return self._taken(causal).with_history(q, k, permutation, history, causal=causal, scale=scale)

    def _taken(self, causal: bool) -> Scorer[PermutationT_contra, ScoresT_co]:
        return self.causal if causal else self.otherwise

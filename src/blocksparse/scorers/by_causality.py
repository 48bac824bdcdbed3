"""One of two scorers, by whether the call is causal."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.per_head import PerHead
from blocksparse.checks.validators import a
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import PermutationT_contra, Scorer, ScoresT_co


@final
@frozen(cache_hash=True)
class ScorerByCausality(Scorer[PermutationT_contra, ScoresT_co]):
    """Score by `causal` in a causal call, as for text, and by `otherwise` in another, as for images and video.

    Only the chosen scorer runs. The two may use different block sizes; `SelectorByCausality`
    chooses among them. What it says of histories is what `causal` says, since prompts are read in chunks where
    calls are causal.
    """

    causal: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))
    otherwise: Scorer[PermutationT_contra, ScoresT_co] = field(validator=a(Scorer))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> ScoresT_co:
        return (self.causal if spec.causal else self.otherwise)(q, k, permutation, spec, history)

    @property
    def keeps_history(self) -> bool:
        return self.causal.keeps_history

    @property
    def values_below(self) -> PerHead | None:
        mine, its = self.causal.values_below, self.otherwise.values_below
        return its if mine is None else mine

    @property
    def takes_paged_keys(self) -> bool:
        return self.causal.takes_paged_keys

    def alignment(self, causal: bool) -> int:
        return (self.causal if causal else self.otherwise).alignment(causal)

"""The role of a scorer that judges blocks by values, too: q, k, v, Permutation -> BlockScores."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.scorers.key_history import KeyHistory
from blocksparse.scorers.scorer import PermutationT_contra, Scorer, ScoresT_co


class ValueScorer(Scorer[PermutationT_contra, ScoresT_co]):
    """A scorer that also asks how much the values of a block weigh in an output, as Stem does (arXiv 2603.06274).

    Pipelines call `with_values` in place of the scorer itself, and `Pipeline.choose` then needs `v`. It keeps no
    history, and does not stand inside another scorer.
    """

    @abstractmethod
    def with_values(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: PermutationT_contra, spec: AttentionSpec
    ) -> ScoresT_co:
        """Score blocks of `q` `[B, Hq, M, D]`, `k` `[B, Hkv, N, D]`, `v` `[B, Hkv, N, Dv]`, in original order."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        permutation: PermutationT_contra,
        spec: AttentionSpec,
        history: KeyHistory | None = None,
    ) -> ScoresT_co:
        """Refuse a call without values.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__} judges blocks by values, and was called without them: pass them, as in "
            "pipeline.choose(q, k, v); inside another scorer it gets none"
        )


def scored(
    scorer: Scorer[PermutationT_contra, ScoresT_co],
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    permutation: PermutationT_contra,
    spec: AttentionSpec,
    history: KeyHistory | None = None,
) -> ScoresT_co:
    """Scores from a scorer of either kind; a `ValueScorer` rejects a call without values."""
    if v is not None and isinstance(scorer, ValueScorer):
        found: ScoresT_co = scorer.with_values(q, k, v, permutation, spec)
        return found
    return scorer(q, k, permutation, spec, history)

"""Means of paired differences, with an interval that stays honest where hardly any pair differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from attrs import frozen


@final
@frozen
class Difference:
    """A mean difference of scores in [0, 1] and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


def difference(scores: Sequence[float], dense: Sequence[float]) -> Difference:
    """Of each sample's score from the score of dense attention on the same sample.

    The interval is that of Agresti and Min (2005, Statistics in Medicine 24) for paired proportions: four half
    observations are added, one for each pair of right and wrong. So it does not shrink to nothing when no sample
    of a few differs.

    Raises:
        ValueError: there are no samples, or not equally many.
    """
    if not scores or len(scores) != len(dense):
        raise ValueError(
            f"there must be as many scores, at least one, as dense ones: {len(scores)} and {len(dense)}"
        )
    pairs = [a - b for a, b in zip(scores, dense, strict=True)]
    count = len(pairs) + 2
    centre = sum(pairs) / count  # the added differences are 0, 0, 1 and -1
    variance = (
        sum((x - centre) ** 2 for x in pairs) + 0.5 * (2 * centre**2 + (1 - centre) ** 2 + (1 + centre) ** 2)
    ) / count
    half = 1.96 * math.sqrt(variance / count)
    return Difference(sum(pairs) / len(pairs), max(-1.0, centre - half), min(1.0, centre + half))

"""Which candidates of a unit are worth a run of the model, by what one layer's q, k and v tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

from attrs import frozen


@final
@frozen
class Probe:
    """One candidate on the q, k and v of one unit."""

    density: float
    error: float  # relative L1 distance of the output from dense attention's


def worth_running(costs: Mapping[str, float], errors: Mapping[str, float], keep: int, dense: float) -> list[str]:
    """The `keep` candidates that others beat the least, the cheapest first; none that costs as much as `dense`.

    A candidate is beaten by one that costs no more and errs less, by the factor between the errors. Errors of
    layers order candidates only roughly, so one that is beaten by little stays. If more are unbeaten than are
    kept, those go whose neighbours are nearest in cost.
    """
    cheaper = sorted((name for name in costs if costs[name] < dense), key=lambda name: (costs[name], errors[name]))

    def beaten(name: str) -> float:
        least = min(errors[other] for other in cheaper if costs[other] <= costs[name])
        return math.log(max(errors[name], 1e-12) / max(least, 1e-12))

    unbeaten = [name for name in cheaper if beaten(name) == 0]
    if len(unbeaten) <= keep:
        kept = sorted(cheaper, key=lambda name: (beaten(name), costs[name]))[:keep]
        return [name for name in cheaper if name in kept]
    while len(unbeaten) > max(keep, 2):
        gaps = [costs[c] / max(costs[a], 1e-12) for a, c in zip(unbeaten, unbeaten[2:], strict=False)]
        del unbeaten[1 + gaps.index(min(gaps))]
    return unbeaten[-keep:]

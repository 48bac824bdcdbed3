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


def worth_running(
    costs: Mapping[str, float],
    errors: Mapping[str, float],
    families: Mapping[str, str],
    keep: int,
    dense: float,
) -> list[str]:
    """The `keep` candidates to run the model with, the cheapest first; none that costs as much as `dense`.

    Errors of layers order the settings of one preset, but not presets: `s2o` has the least error and loses most at
    answers. So a candidate goes if another of its family costs no more and errs no more, and then families take
    turns. Each offers the one that errs least in comparison with all that cost no more.
    """
    cheaper = sorted((name for name in costs if costs[name] < dense), key=lambda name: (costs[name], errors[name]))

    def beaten(name: str) -> tuple[float, float]:
        least = min(errors[other] for other in cheaper if costs[other] <= costs[name])
        return errors[name] / max(least, 1e-12), costs[name] * errors[name]

    offers: dict[str, list[str]] = {}
    least: dict[str, float] = {}
    for name in cheaper:
        if errors[name] < least.get(families[name], math.inf):
            least[families[name]] = errors[name]
            offers.setdefault(families[name], []).append(name)
    kept: list[str] = []
    while any(offers.values()) and len(kept) < keep:
        turn = [min(some, key=beaten) for some in offers.values() if some]
        for name in sorted(turn, key=beaten)[: keep - len(kept)]:
            offers[families[name]].remove(name)
            kept.append(name)
    return [name for name in cheaper if name in kept]

"""A load as servers have it: prompts of mixed lengths that arrive at random, and how long their tokens take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from attrs import frozen

# Shares of the prompts, and the lengths that are as likely within each.
LENGTHS = ((0.70, 128, 2048), (0.25, 2048, 16384), (0.05, 32000, 32000))
ANSWERS = (32, 256)


class Arrival(NamedTuple):
    """One request."""

    at: float  # seconds after the begin
    tokens: int  # of the prompt
    answer: int


def poisson(rate: float, seconds: float, *, seed: int = 0, lengths: Sequence[Any] = LENGTHS) -> list[Arrival]:
    """Requests of a Poisson process of `rate` per second; the same ones for every engine."""
    draw, at, found = random.Random(f"{rate} {seconds} {seed}"), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        (_, least, most) = draw.choices(lengths, [share for share, _, _ in lengths])[0]
        found.append(Arrival(at, draw.randint(least, most), draw.randint(*ANSWERS)))
    return found


@frozen
class Latency:
    """Of all requests of a load. Definitions as of `vllm bench serve`."""

    requests: int
    finished: int
    requests_per_s: float  # from the first arrival until the last token
    ttft_ms: dict[str, float]  # from arrival to the first token: p50, p95, p99
    itl_ms: dict[str, float]  # between tokens that follow one another: p50, p99

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], times: Sequence[Sequence[float]]) -> Latency:
        """
        Args:
            times: when each token of each request came, in seconds after the begin.
        """
        first = [some[0] - arrival.at for arrival, some in zip(arrivals, times, strict=True) if some]
        gaps = [b - a for some in times for a, b in pairwise(some)]
        finished = sum(len(some) == arrival.answer for arrival, some in zip(arrivals, times, strict=True))
        took = max((some[-1] for some in times if some), default=0.0) - arrivals[0].at
        return cls(
            len(arrivals), finished, finished / took if took else 0.0,
            {f"p{q}": percentile(first, q) for q in (50, 95, 99)},
            {f"p{q}": percentile(gaps, q) for q in (50, 99)},
        )  # fmt: skip


def percentile(seconds: Sequence[float], q: float) -> float:
    """In milliseconds, between the two nearest values as numpy has it; nan of nothing."""
    if not seconds:
        return float("nan")
    ordered = sorted(seconds)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return 1000 * (ordered[low] + (ordered[high] - ordered[low]) * (at - low))

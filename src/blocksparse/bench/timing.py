"""Medians of calls that take turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from attrs import asdict, frozen

ROUNDS = 3
_COLD = 256 << 20  # bytes; more than any level-2 cache


@frozen
class Figure:
    """A time, or why there is none."""

    ms: float | None = None  # median of all repeats
    spread: float | None = None  # of the medians of the rounds: largest over smallest, minus 1
    why: str | None = None

    def as_row(self) -> dict[str, Any]:
        """The figure as JSON values."""
        return {name: x for name, x in asdict(self).items() if x is not None}


def medians(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, budget_ms: float
) -> dict[str, Figure]:
    """Milliseconds of each call: three rounds, in each as many repeats as its third of the budget has room for.

    Every round has a different order, or one call would always run after the same other call.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        once = min(repeated(call, 2, device))
        repeats[name] = max(1, min(100, int(budget_ms / ROUNDS / max(once, 1e-3))))
    warm_up = 0 if device.type == "cpu" else 1
    for turn in range(ROUNDS):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            repeated(calls[name], warm_up * repeats[name], device)
            times[name].append(repeated(calls[name], repeats[name], device))
    return {name: _figure(rounds) for name, rounds in times.items()}


def _figure(rounds: list[list[float]]) -> Figure:
    middles = [statistics.median(times) for times in rounds]
    return Figure(statistics.median(chain.from_iterable(rounds)), max(middles) / min(middles) - 1)


def repeated(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of single calls; on a GPU as `triton.testing.do_bench` has it, by events and from a cold L2."""
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    cold = torch.empty(_COLD, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start_event, end_event in events:
        cold.zero_()
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(device)
    return [float(start_event.elapsed_time(end_event)) for start_event, end_event in events]

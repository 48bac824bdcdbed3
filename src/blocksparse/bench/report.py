"""Output of `blocksparse bench`: one table, and a sentence per preset about the break-even length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from blocksparse.bench.run import DENSE, Crossover, Row


def table(rows: Sequence[Row]) -> str:
    """One line per length and method; lengths and times are right-aligned."""
    cells = [("tokens", "method", "time", "speed-up", "density", "")]
    before = None
    for row in rows:
        tokens = "" if row.tokens == before else f"{row.tokens:,}"
        before = row.tokens
        cells.append(
            (
                tokens,
                row.method,
                "-" if row.ms is None else _time(row.ms),
                "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
                "-" if row.density is None else f"{row.density:.1%}",
                row.why or "",
            )
        )
    width = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join(
        f"{tokens:>{width[0]}}  {method:<{width[1]}}  {time:>{width[2]}}  {faster:>{width[3]}}  "
        f"{density:>{width[4]}}  {why}".rstrip()
        for tokens, method, time, faster, density, why in cells
    )


def crossovers(rows: Sequence[Row]) -> str:
    """A sentence per preset: from which length on it is faster than dense attention."""
    methods = dict.fromkeys(row.method for row in rows if row.method != DENSE)
    return "\n".join(f"{method} {_crossover(rows, method)}" for method in methods)


def legend(rows: Sequence[Row]) -> str:
    """Explanation of the columns, and the executors that ran."""
    lines = [
        "time: median of whole causal calls: ordering, scoring, selecting and attending",
        "speed-up: of dense attention's time over this one; dense is the fastest kernel here",
        "density: work as a share of dense attention's, on random inputs whose heads look at topics,",
        "at a system prompt and at a few heavy keys; that of your prompts may differ, and time follows it",
    ]
    if shaky := max((row.spread for row in rows if row.spread is not None), default=0.0):
        lines.append(f"medians of three rounds differ by up to {shaky:.0%}")
    ran: dict[str, list[str]] = {}
    for row in rows:
        if row.executor is not None and row.method not in ran.setdefault(row.executor, []):
            ran[row.executor].append(row.method)
    for executor, methods in ran.items():
        lines.append(f"{', '.join(methods)}: {executor}")
    return "\n".join(lines)


def _crossover(rows: Sequence[Row], method: str) -> str:
    found, ran = Crossover.of(rows, method), [row.tokens for row in rows if row.method == method and row.speed_up]
    if not ran:
        return "ran at no length"
    if found.tokens is None:
        longest = "measured" if ran[-1] == rows[-1].tokens else "at which it ran"
        return f"is not faster than dense attention at {ran[-1]:,} tokens, the longest length {longest}"
    if found.at_most:
        return f"is faster than dense attention at every length measured, from {found.tokens:,.0f} tokens on"
    # Two digits that count, as the lengths between which it lies are far apart; and up, to where it is faster.
    step = 10 ** max(math.floor(math.log10(found.tokens)) - 1, 0)
    return f"is faster than dense attention from about {math.ceil(found.tokens / step) * step:,} tokens on"


def _time(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3f} ms"

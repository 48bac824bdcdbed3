"""Tables of what `python -m benchmarks.tasks` measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.tasks.methods import CEILING, DENSE, FLOOR, PLANS
from benchmarks.tasks.paired import Difference, difference

Row = dict[str, Any]


def overall(row: Row, dense: Row, tasks: Sequence[str]) -> tuple[float, Difference]:
    """The mean score over the samples of these tasks, at least one, and its difference from dense attention."""
    scores = [score for task in tasks for score in row["scores"][task]]
    return sum(scores) / len(scores), difference(
        scores, [score for task in tasks for score in dense["scores"][task]]
    )


def counted(dense: Row, rows: Iterable[Row]) -> list[str]:
    """The tasks that were run sparsely, or those of `dense` if nothing was."""
    sparse = [list(row["scores"]) for row in rows if row["preset"] != DENSE]
    return sparse[0] if sparse else list(dense["scores"])


def between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The height at `x` of the line through points, or None outside of them."""
    for (a, low), (b, high) in pairwise(sorted(points)):
        if a <= x <= b:
            return low if a == b else low + (high - low) * (x - a) / (b - a)
    return None


def saving(rows: Sequence[Row], plan: Row, cost: str, *, or_less: bool = False) -> tuple[str, float, float] | None:
    """The single preset that costs least at the KL of a plan, what it costs, and which share of it the plan saves.

    Between two settings of a preset, the logarithm of the cost is a straight line over that of KL; outside of the
    settings that were measured a preset is not compared. A plan in which every layer is dense saves nothing.

    Args:
        cost: "density" or "attention_ms"; rows without a time are left out.
        or_less: a preset that loses less in all of its settings is compared too, in the boldest of them.
    """
    if plan["kl"] <= 0 or plan[cost] is None:
        return None
    best: tuple[str, float] | None = None
    for preset in {row["preset"] for row in rows} - {DENSE, FLOOR, CEILING, *PLANS.values()}:
        points = [
            (math.log(row["kl"]), math.log(row[cost]))
            for row in rows
            if row["preset"] == preset and row["kl"] > 0 and row[cost] is not None
        ]
        there = between(points, math.log(plan["kl"]))
        if there is None and or_less and points and max(points)[0] < math.log(plan["kl"]):
            there = max(points)[1]
        if there is not None and (best is None or math.exp(there) < best[1]):
            best = preset, math.exp(there)
    return None if best is None else (*best, 1 - plan[cost] / best[1])


def as_dense(rows: Sequence[Row], dense: Row, tasks: Sequence[str]) -> list[Row]:
    """The rows whose score is not below dense attention's by more than samples can tell: its interval holds 0."""
    return [row for row in rows if row["preset"] != DENSE and overall(row, dense, tasks)[1].high >= 0]


def report(rows: Sequence[Row]) -> str:
    """Markdown tables, a length each."""
    parts = []
    for tokens in sorted({row["tokens"] for row in rows}):
        some = [row for row in rows if row["tokens"] == tokens]
        dense = next((row for row in some if row["preset"] == DENSE), None)
        if dense is not None:
            parts.append(_table(some))
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    dense = next(row for row in rows if row["preset"] == DENSE)
    tasks = counted(dense, rows)
    of_dense = "".join(f"{task} {100 * _mean(some):.0f} %, " for task, some in dense["scores"].items())
    samples = f", {dense['samples']} samples of each task" if dense["samples"] else ""
    lines = [
        f"### {dense['tokens']} tokens{samples}\n",
        f"Dense attention: {of_dense}perplexity {dense['perplexity']:.2f}, attention "
        f"{_ms(dense)} ms. Counted: {', '.join(tasks) or 'none'}.\n",
        "| method | setting | density | KL | perplexity | attention ms |"
        + "".join(f" {task} |" for task in tasks)
        + (" all, from dense (95 %) | random, oracle at this density |" if tasks else ""),
        "|" + "---|" * (6 + (len(tasks) + 2 if tasks else 0)),
    ]
    for row in sorted(rows, key=lambda row: (row["preset"], row["density"])):
        if row["preset"] == DENSE:
            continue
        name = row["preset"].replace("|", "\\|")  # as Markdown wants it in a table
        lines.append(
            f"| `{name}` | {row['setting']} | {row['density']:.3f} | {row['kl']:.4f} | "
            f"{row['perplexity']:.2f} | {_ms(row)} |{_scores(rows, row, dense, tasks) if tasks else ''}"
        )
    for plan in (row for row in rows if row["preset"] in PLANS.values()):
        lines += _savings(rows, plan, dense, tasks)
    return "\n".join(lines) + "\n"


def _savings(rows: Sequence[Row], plan: Row, dense: Row, tasks: Sequence[str]) -> list[str]:
    """Sentences that compare a plan with single presets, by blocks and by time."""
    single = f"\nAt the KL of `{plan['preset']}` {plan['setting']} ({plan['kl']:.4f}) the best single preset"
    lines = []
    for cost, verb, unit, digits, less in (
        ("density", "keeps", "of the blocks", 3, "fewer"),
        ("attention_ms", "attends in", "ms", 1, "less"),
    ):
        found = [(single, saving(rows, plan, cost))]
        if tasks:
            scoring = saving(as_dense(rows, dense, tasks), plan, cost, or_less=True)
            found.append((f"{single} of those that score as dense attention does", scoring))
        for which, best in found:
            if best is not None:
                preset, of_preset, saved = best
                lines.append(
                    f"{which}, `{preset}`, {verb} {of_preset:.{digits}f} {unit}, and the plan "
                    f"{plan[cost]:.{digits}f}: {100 * abs(saved):.0f} % {less if saved >= 0 else 'more'}."
                )
    return lines


def _scores(rows: Sequence[Row], row: Row, dense: Row, tasks: Sequence[str]) -> str:
    """The cells of a row that are about tasks."""
    score, from_dense = overall(row, dense, tasks)
    each = " | ".join(f"{100 * _mean(row['scores'][task]):.0f}" for task in tasks)
    bounds = ", ".join(
        "-" if value is None else f"{100 * value:.0f}"
        for value in (_level(rows, dense, tasks, name, row["density"]) for name in (FLOOR, CEILING))
    )
    return (
        f" {each} | {100 * score:.0f} ({100 * from_dense.mean:+.0f}: {100 * from_dense.low:+.0f} to "
        f"{100 * from_dense.high:+.0f}) | {bounds} |"
    )


def _level(rows: Sequence[Row], dense: Row, tasks: Sequence[str], preset: str, density: float) -> float | None:
    points = [(row["density"], overall(row, dense, tasks)[0]) for row in rows if row["preset"] == preset]
    return between(points, density)


def _ms(row: Row) -> str:
    return "-" if row["attention_ms"] is None else f"{row['attention_ms']:.1f}"


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)

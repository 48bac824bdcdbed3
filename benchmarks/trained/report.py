"""Markdown tables of what `python -m benchmarks.trained` measured: one row is one configuration at one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tasks.paired import Difference, difference
from benchmarks.trained.measure import BOUND, DENSE

Row = dict[str, Any]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one number."""
    return sum(values) / len(values)


def kl_of(row: Row) -> dict[str, float]:
    """Mean KL by kind of text."""
    return {kind: mean(values) for kind, values in row["kl"].items()}


def counted(rows: Sequence[Row]) -> list[str]:
    """The tasks that count: those that some row besides dense attention was measured on."""
    return next((list(row["scores"]) for row in rows if row["method"] != DENSE and row["scores"]), [])


def score_of(row: Row, dense: Row, names: Sequence[str]) -> tuple[float, Difference, int]:
    """The mean score over the named tasks, its paired difference from dense attention, and the samples' number."""
    mine = [score for name in names for score in row["scores"][name]]
    of_dense = [score for name in names for score in dense["scores"][name]]
    return mean(mine), difference(mine, of_dense), len(mine)


def table(rows: Sequence[Row]) -> str:
    """A table for each model, half and length."""
    parts = []
    for model, half, tokens in sorted({(row["model"], row["half"], row["tokens"]) for row in rows}):
        some = [row for row in rows if (row["model"], row["half"], row["tokens"]) == (model, half, tokens)]
        dense = next((row for row in some if row["method"] == DENSE), None)
        if dense is None:
            continue
        names = counted(some)
        kinds = list(dense["kl"])
        parts += [
            f"### {model}, {tokens} tokens, the half to {half}\n",
            "| method | density | "
            + "".join(f"KL, {kind} | " for kind in kinds)
            + "TTFT, ms | speedup | tasks, % | from dense, points (95 %) |",
            "|" + "---|" * (6 + len(kinds)),
        ]
        for row in some:
            kl = [f"{value:.4f}" for value in kl_of(row).values()] or ["-"] * len(kinds)
            density = f"{mean(list(row['density'].values())):.3f}" if row["density"] else "-"
            ms, speedup, score, apart = "-", "-", "-", "-"
            if row["ttft_ms"] is not None and dense["ttft_ms"] is not None:
                ms, speedup = f"{row['ttft_ms']:.0f}", f"{dense['ttft_ms'] / row['ttft_ms']:.2f}x"
            if row["scores"] and names and row["method"] != BOUND:
                value, gap, _ = score_of(row, dense, names)
                score = f"{100 * value:.1f}"
                apart = f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
            name = row["method"].replace("|", "\\|")
            parts.append(f"| `{name}` | {density} | {' | '.join([*kl, ms, speedup, score, apart])} |")
        if names:
            n = score_of(dense, dense, names)[2]
            left = sorted(set(dense["scores"]) - set(names))
            parts.append(
                f"\nn = {n}: {', '.join(names)}. Left out, dense under 60 %: {', '.join(left) or 'none'}.\n"
            )
    return "\n".join(parts)

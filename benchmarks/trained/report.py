"""Markdown tables of what `python -m benchmarks.trained` measured: one row is one configuration at one length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks.results import RESULTS
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
    """The tasks that count: those that all rows with scores besides dense attention were measured on."""
    first, *others = [row["scores"] for row in rows if row["method"] != DENSE and row["scores"]] or [{}]
    return [task for task in first if all(task in other for other in others)]


def score_of(row: Row, dense: Row, names: Sequence[str]) -> tuple[float, Difference, int]:
    """The mean score over the named tasks, its paired difference from dense attention, and the samples' number.

    Dense attention may have more samples: the first ones of a task are the same.
    """
    mine = [score for name in names for score in row["scores"][name]]
    of_dense = [score for name in names for score in dense["scores"][name][: len(row["scores"][name])]]
    return mean(mine), difference(mine, of_dense), len(mine)


def table(rows: Sequence[Row]) -> str:
    """A table for each model, half, length and seed: pairs are of the same prompts."""
    parts = []
    one = itemgetter("model", "half", "tokens", "seed")
    for model, half, tokens, seed in sorted(set(map(one, rows))):
        some = [row for row in rows if one(row) == (model, half, tokens, seed)]
        dense = next((row for row in some if row["method"] == DENSE), None)
        if dense is None:
            continue
        names = counted(some)
        kinds = list(dense["kl"])
        parts += [
            f"### {model}, {tokens} tokens, the half to {half}, seed {seed}\n",
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
                f"\nn = {n}: {', '.join(names)}. Left out, dense under 60 % or not run by all: "
                f"{', '.join(left) or 'none'}.\n"
            )
    return "\n".join(parts)


def write_results(name: str, rows: Sequence[Row], command: str, inputs: str, longer: Sequence[Row] = ()) -> None:
    """Write `rows` as the table `name` of the evidence, and as its raw data.

    Args:
        longer: rows of the same methods at one other length, whose speedup becomes a column.
    """
    far = {row["method"]: row["ttft_ms"] for row in longer}
    kinds = sorted({kind for row in rows for kind in row["kl"]}, key=("prose", "manual", "code", "chat").index)
    columns = [
        *("model", "tokens", "method", "density"), *(f"KL, {kind}" for kind in kinds),
        *("TTFT", "speedup over dense", "tasks", "tasks, from dense", "n"),
        *(f"speedup, {row['tokens'] // 1024}K" for row in longer[:1]),
    ]  # fmt: skip
    lines, one = [], itemgetter("model", "tokens", "seed")
    for row in sorted(rows, key=lambda row: (row["model"], row["tokens"])):
        some = [other for other in rows if one(other) == one(row)]
        dense = next(other for other in some if other["method"] == DENSE)
        kl = kl_of(row)
        cells = [f"{kl[kind]:.4f}" if kind in kl and row is not dense else "-" for kind in kinds]
        timed = row["ttft_ms"] is not None and dense["ttft_ms"] is not None
        cells += [f"{row['ttft_ms']:.0f} ms", f"{dense['ttft_ms'] / row['ttft_ms']:.2f}x"] if timed else ["-", "-"]
        if row["scores"] and (names := counted(some)):
            score, gap, n = score_of(row, dense, names)
            apart = f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
            cells += [f"{100 * score:.1f} %", "-" if row is dense else apart, str(n)]
        else:
            cells += ["-"] * 3
        if longer:
            cells.append(f"{far[DENSE] / far[row['method']]:.2f}x")
        density = f"{mean(list(row['density'].values())):.3f}" if row["density"] else "-"
        lines.append(
            [row["model"], f"{row['tokens'] // 1024}K", f"`{row['method']}`".replace("|", "\\|"), density, *cells]
        )
    first = rows[0]
    found = {
        "machine": f"one {first['device']}",
        "date": first["date"],
        "versions": f"torch {first['torch']}, Triton {first['triton']}, transformers {first['transformers']}",
        "command": f"`{command}`",
        "inputs": inputs,
        "kept": f"raw/{name}.json",
        "keys": 3,
        "columns": columns,
        "rows": lines,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    raw = json.dumps([*rows, *longer], separators=(",", ":"), ensure_ascii=False)
    (RESULTS / "raw" / f"{name}.json").write_text(raw + "\n", encoding="utf-8")

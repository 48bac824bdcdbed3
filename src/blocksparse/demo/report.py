"""Results of the demo: a printed table and a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import asdict, filters
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from blocksparse.demo.measure import Row

_REPLY = 10  # letters of an answer in the table; the JSON file has all


def table(rows: list[Row], *, title: str) -> Table:
    """One line per method; speed-up and perplexity are against the first row, which is dense."""
    dense = rows[0]
    # Fits in 80 columns, the width when the output is not a terminal; long names of methods are folded.
    result = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    result.add_column("method", overflow="fold", vertical="bottom")
    for heading in ("first\ntoken", "attention", "speed-\nup", "density", "perplexity"):
        result.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    result.add_column("answer", vertical="bottom", no_wrap=True)
    for row in rows:
        more = "" if row is dense else f" ({row.perplexity / dense.perplexity - 1:+.1%})"
        result.add_row(
            row.method,
            _seconds(row.first_token_s),
            _seconds(row.attention_s),
            f"{dense.attention_s / row.attention_s:.2f}x",
            f"{row.density:.1%}",
            f"{row.perplexity:.2f}{more}",
            f"{'[green]right[/]' if row.right else '[red]wrong[/]'} {escape(_short(row.reply))}",
        )
    return result


def _short(reply: str) -> str:
    return reply if len(reply) <= _REPLY else reply[: _REPLY - 1] + "…"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def legend(rows: list[Row]) -> str:
    """Explanation of the columns."""
    lines = [
        "first token: time to read the prompt and give the first token of the answer",
        "attention: of that, the time in attention; speed-up: of attention, against dense",
        "density: share of dense attention's work, mean over layers and heads",
        "perplexity: of the text, from the same pass, and its change against dense",
    ]
    sparse = rows[1:]
    if sparse:
        compiled = sum(row.compile_s for row in sparse)
        lines.append(f"not counted: the first call of each pipeline, which compiles: {compiled:.0f} s in all")
    executors: dict[str, list[str]] = {}
    for row in sparse:
        executors.setdefault(row.executor, []).append(row.method)
    for executor, methods in executors.items():
        which = "sparse attention" if len(executors) == 1 else ", ".join(methods)
        lines.append(f"{which}: {executor}")
    return "\n".join(lines)


def write_json(rows: list[Row], path: Path, **about: Any) -> None:
    """Write what was run (`about`) and every row."""
    kept = filters.exclude("qkv")
    path.write_text(json.dumps({**about, "rows": [asdict(row, filter=kept) for row in rows]}, indent=2) + "\n")

"""Tables of `benchmarks.quality`: `python -m benchmarks.quality_report quality.json`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def mean(row: Row, figure: str) -> float:
    """Over the layers of one result."""
    return statistics.fmean(row["layers"][figure])


def table(rows: list[Row]) -> str:
    """One Markdown table per text and length, a line per preset, setting and block."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["text"], row["tokens"]].append(row)
    parts = []
    for (text, tokens), group in groups.items():
        dense = next(row for row in group if row["preset"] == "dense")
        parts.append(f"\n### {text}, {tokens} tokens; dense perplexity {dense['perplexity']:.2f}, ")
        parts[-1] += f"{dense['found']} of {dense['needles']} facts found\n"
        parts.append("| preset | setting | block | density | mass | L1 | MSE | perplexity | facts |")
        parts.append("|---|---|---|---|---|---|---|---|---|")
        for row in group:
            if row["preset"] == "dense":
                continue
            quality = "| | |"
            if row["perplexity"] is not None:
                quality = f"| {row['perplexity']:.2f} | {row['found']} |"
            parts.append(
                f"| {row['preset']} | {row['setting']} | {row['block']} | {mean(row, 'density'):.3f} | "
                f"{mean(row, 'covered_mass'):.3f} | {mean(row, 'l1'):.4f} | {mean(row, 'mse'):.1e} {quality}"
            )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    rows = [row for path in arguments.results for row in json.loads(path.read_text(encoding="utf-8"))]
    print(table(rows))


if __name__ == "__main__":
    main()

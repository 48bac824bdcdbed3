"""Tables and the Pareto picture of `benchmarks.quality`: `python -m benchmarks.quality_report quality.json`."""

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


def picture(rows: list[Row], path: Path) -> None:
    """Density against relative L1, means over layers: a panel per length and block, a line per preset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    texts = sorted({row["text"] for row in rows})
    panels = sorted({(row["tokens"], row["block"]) for row in rows if row["block"]})
    blocks = sorted({block for _, block in panels}, reverse=True)
    lengths = sorted({tokens for tokens, _ in panels})
    names = [name for name in dict.fromkeys(row["preset"] for row in rows) if name not in ("dense", "oracle")]
    markers, colours = "osD^vP*X<>hdp", [*(f"C{i}" for i in range(10)), "black", "gold"]
    figure, grid = plt.subplots(
        len(blocks), len(lengths), figsize=(5.2 * len(lengths), 4.6 * len(blocks)), sharey=True, squeeze=False
    )
    for i, block in enumerate(blocks):
        for j, tokens in enumerate(lengths):
            axes = grid[i][j]
            for number, name in enumerate(["oracle", *names]):
                points: dict[str, list[Row]] = defaultdict(list)
                for row in rows:
                    if (row["preset"], row["tokens"], row["block"]) == (name, tokens, block):
                        points[row["setting"]].append(row)
                line = sorted(
                    (
                        statistics.fmean(mean(r, "density") for r in same),
                        statistics.fmean(mean(r, "l1") for r in same),
                    )
                    for same in points.values()
                )
                if line:
                    x, y = zip(*line, strict=True)
                    style: dict[str, Any] = (
                        {"color": "black", "linestyle": "--", "marker": "."}
                        if name == "oracle"
                        else {
                            "color": colours[number - 1],
                            "marker": markers[number % len(markers)],
                            "linewidth": 1,
                        }
                    )
                    axes.plot(x, y, label=name, **style)
            axes.set(xscale="log", yscale="log", title=f"{tokens} tokens, blocks of {block}")
            axes.grid(visible=True, which="both", alpha=0.2)
            axes.set_xticks([0.05, 0.1, 0.2, 0.3, 0.5, 1.0], ["5%", "10%", "20%", "30%", "50%", "100%"])
            axes.xaxis.minorticks_off()
            if i == len(blocks) - 1:
                axes.set_xlabel("density (work over dense attention's)")
            if j == 0:
                axes.set_ylabel("relative L1 error, mean over layers")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=7, frameon=False)
    figure.suptitle(f"SmolLM2-135M, mean over {' and '.join(texts)}; lower left is better")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, default=Path("quality.png"))
    arguments = parser.parse_args()
    rows = [row for path in arguments.results for row in json.loads(path.read_text(encoding="utf-8"))]
    print(table(rows))
    picture(rows, arguments.picture)


if __name__ == "__main__":
    main()

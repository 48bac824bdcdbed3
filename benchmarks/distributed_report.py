"""The table and the picture of `benchmarks.distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Row, gibibytes, milliseconds, tokens
from benchmarks.report import table as markdown

PARTS = {"attention_ms": "#0072B2", "masks_ms": "#E69F00", "shown_ms": "#D55E00"}
NAMES = {"attention_ms": "attention", "masks_ms": "masks", "shown_ms": "communication that is not hidden"}


def alone(rows: list[Row], N: int) -> Row | None:
    """The row of one process at this length."""
    return next((row for row in rows if row["N"] == N and row.get("ranks") == 1), None)


def table(rows: list[Row]) -> str:
    """A row for each length and scheme; rows that could not be measured say why below."""
    body = []
    for row in (row for row in rows if "why" not in row):
        one = alone(rows, row["N"])
        sent = row.get("bytes_sent")
        body.append(
            [
                tokens(row["N"]),
                row["scheme"],
                str(row["ranks"]),
                f"{row['density']:.3f}",
                milliseconds(row["ms"]),
                "-" if one is None or row is one else f"{one['ms'] / row['ms']:.2f}",
                milliseconds(row["attention_ms"]),
                milliseconds(row["masks_ms"]),
                milliseconds(row["communication_ms"]) if sent else "-",
                gibibytes(sent),
                gibibytes(row["peak_bytes"]),
            ]
        )
    head = (
        "tokens", "scheme", "ranks", "density", "call, ms", "times one", "attention, ms", "masks, ms",
        "communication alone, ms", "sent, GiB", "peak, GiB",
    )  # fmt: skip
    why = "".join(f"\n{tokens(row['N'])} tokens: {row['why']}\n" for row in rows if "why" in row)
    return markdown(head, body) + "\n" + why


def draw(rows: list[Row], folder: Path) -> None:
    """A panel for each length, with the parts of each call's time and the memory of a rank; needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: draw elsewhere with --draw")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if "why" not in row]
    if not rows:
        return
    lengths = list(dict.fromkeys(row["N"] for row in rows))
    figure, panels = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths) + 1, 3.6), squeeze=False)
    for N, axes in zip(lengths, panels[0], strict=True):
        here = [row for row in rows if row["N"] == N]
        _panel(axes, here, alone(rows, N))
        axes.set_title(f"{tokens(N)} tokens, density {here[0]['density']:.2f}", fontsize=10)
    panels[0][0].set_ylabel("ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(PARTS), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(folder / "distributed.png", dpi=130)
    plt.close(figure)


def _panel(axes: Any, rows: list[Row], one: Row | None) -> None:
    for place, row in enumerate(rows):
        parts = row | {"shown_ms": max(0.0, row["ms"] - row["attention_ms"] - row["masks_ms"])}
        below = 0.0
        for part, colour in PARTS.items():
            label = NAMES[part] if place == 0 else None
            axes.bar(place, parts[part], bottom=below, color=colour, width=0.7, label=label)
            below += parts[part]
        notes = [] if one is None or row is one else [f"{one['ms'] / row['ms']:.2f} x"]
        if row["peak_bytes"] is not None:
            notes.append(f"{row['peak_bytes'] / 2**30:.1f} GiB")
        axes.text(place, below, "\n".join(notes), ha="center", va="bottom", fontsize=8)
    names = [f"{row['scheme'].replace(', ', chr(10))}\n{row['ranks']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.margins(y=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

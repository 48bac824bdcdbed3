"""Charts of the documentation, drawn from `docs/evidence/results` in a light and a dark version.

`python -m benchmarks.figures` draws them all. At most five lines, each with its name at its end, and one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from benchmarks.results import Results

Line = tuple[str, str, list[tuple[float, float]]]  # name, colour, points
# A colour means one thing in all pictures: blue is `auto`, and grey what it is compared with; purple is attention,
# green what is kept, orange what is always kept, and pale grey what is not computed.
LIGHT_BLUE, BLUE, DARK_BLUE, GREY = "#9cc4ea", "#3b82c4", "#24588c", "#8a8f98"
GREEN, ORANGE, DROPPED = "#2a9d74", "#d9822b", "#b9bdc5"
SHADES = ListedColormap(colormaps["Purples"](np.linspace(0.12, 1.0, 256)))  # darker: more attention
THEMES = {"": ("white", "#1f2328"), "-dark": ("#1e2129", "#e2e4e9")}  # paper, ink; the dark one is the site's


def speed_and_kl() -> Any:
    """What `auto` gains by length in a trained model, and its KL by kind of text."""
    found = Results.named("trained-auto")
    ticks = {8192: "8K", 16384: "16K", 32768: "32K", 65536: "64K", 131072: "128K"}

    def gain(method: str) -> list[tuple[float, float]]:
        rows = {N: f"qwen2.5-coder-1.5b, {tick}, {method}" for N, tick in ticks.items()}
        return [(N, found.cell(row, "speedup over dense")) for N, row in rows.items()]

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7))
    _lines(left, [("no attention\n(upper bound)", GREY, gain("no attention")), ("auto()", BLUE, gain("auto()"))])
    left.axhline(1, color=GREY, linewidth=1, linestyle="--")
    left.annotate(
        "dense attention", (131072, 1), xytext=(0, 4), textcoords="offset points", color=GREY, ha="right"
    )
    at_32k, at_128k = dict(gain("auto()"))[32768], dict(gain("auto()"))[131072]
    left.set(title=f"TTFT speedup: {at_32k:.2f}x at 32K tokens,\n{at_128k:.2f}x at 128K", ylim=(0, 4.5))
    left.set_ylabel("TTFT speedup over dense attention")
    _by_length(left, ticks)
    left.set_xlabel("prompt tokens (log scale)")
    kinds = ("prose", "manual", "code", "chat")
    for shift, (colour, method) in enumerate(
        ((LIGHT_BLUE, "auto('careful')"), (BLUE, "auto()"), (DARK_BLUE, "auto('fast')"))
    ):
        heights = [found.cell(f"qwen2.5-coder-1.5b, 32K, {method}", f"KL, {kind}") for kind in kinds]
        right.bar([x + 0.27 * (shift - 1) for x in range(4)], heights, 0.25, color=colour, label=method)
    right.set_xticks(range(4), kinds)
    right.set(title="KL from dense attention at 32K tokens\n(lower is better)", ylabel="KL of next tokens, nats")
    right.set_xlabel("kind of text")
    right.legend(frameon=False)
    about = f"Qwen2.5-Coder-1.5B-Instruct, bf16, one {found.chip}"
    figure.text(0.5, 0.0, about, ha="center", va="top", color=GREY)
    figure.tight_layout()
    return figure


def pipeline() -> Any:
    """The four stages, and what each hands to the next."""
    size = 6
    generator = np.random.default_rng(3)
    weight = generator.random((size, size)) ** 3 + np.eye(size)  # a heavy diagonal
    weight[:, 0] += 0.9
    past = np.tri(size, dtype=bool)
    kept = past & (weight > 0.55)
    stages = (
        ("Permuter", "orders the keys", "Permutation"),
        ("Scorer", "estimates each\nblock's attention", "BlockScores"),
        ("Selector", "chooses the blocks\nto keep", "BlockMask"),
        ("Executor", "computes attention\nover the kept blocks", "AttentionOutput"),
    )
    ink = plt.rcParams["text.color"]
    figure, axes = plt.subplots(figsize=(8.8, 2.5))
    axes.set(xlim=(-1.05, 9.95), ylim=(-1.8, 1.15), aspect="equal")
    axes.axis("off")
    arrow = {"arrowstyle": "-|>", "color": ink, "linewidth": 1.4}
    axes.text(-0.6, 0.6, "q, k, v", ha="center", va="center", fontsize=11)
    for i, (name, does, value) in enumerate(stages):
        x = 2.36 * i
        axes.add_patch(Rectangle((x + 0.05, 0.1), 2.0, 1.0, facecolor="none", edgecolor=ink))
        axes.text(x + 1.05, 0.86, name, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(x + 1.05, 0.42, does, ha="center", va="center", fontsize=8)
        axes.annotate("", (x + 0.05, 0.6), xytext=(x - (0.18 if i == 0 else 0.31), 0.6), arrowprops=arrow)
        axes.text(x + 1.05, -0.14, value, ha="center", va="center", fontsize=8.5, family="monospace")
    cell = 1.2 / size
    for row, column in zip(*np.nonzero(past), strict=True):
        chosen = GREEN if kept[row, column] else DROPPED
        for i, colour in ((1, SHADES(float(weight[row, column] / weight.max()))), (2, chosen)):
            corner = (2.36 * i + 0.45 + column * cell, -0.36 - (row + 1) * cell)
            axes.add_patch(Rectangle(corner, 0.92 * cell, 0.92 * cell, facecolor=colour))
    for i, names in ((0, (2, 0, 1, 5, 3, 4)), (3, range(size))):
        for place, token in enumerate(names):
            corner = (2.36 * i + 0.45 + place * cell, -0.62)
            axes.add_patch(Rectangle(corner, 0.92 * cell, 0.92 * cell, facecolor="none", edgecolor=ink))
            axes.text(
                corner[0] + 0.46 * cell, -0.62 + 0.44 * cell, str(token), ha="center", va="center", fontsize=7
            )
    notes = ("keys, in the new order", "darker: more attention", "green: kept", "queries, in order")
    for i, (note, y) in enumerate(zip(notes, (-0.8, -1.7, -1.7, -0.8), strict=True)):
        axes.text(2.36 * i + 1.05, y, note, ha="center", va="center", fontsize=7.5)
    axes.text(9.7, 0.6, "out", ha="center", va="center", fontsize=11)
    axes.annotate("", (9.45, 0.6), xytext=(9.13, 0.6), arrowprops=arrow)
    return figure


def _lines(axes: Any, lines: Sequence[Line], up: Sequence[int] = (0,) * 5) -> None:
    """Draw lines with their names at their ends, moved up by so many points."""
    for (name, colour, points), y in zip(lines, up, strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4.5, linewidth=2)
        axes.annotate(name, points[-1], xytext=(7, y), textcoords="offset points", color=colour, va="center")


def _by_length(axes: Any, ticks: dict[int, str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.minorticks_off()
    axes.set_xlim(min(ticks) / 1.15, max(ticks) * 2.6)
    axes.grid(axis="y", alpha=0.2)


CHARTS: dict[str, Callable[[], Any]] = {
    "speed-and-kl": speed_and_kl,
    "pipeline": pipeline,
}


def draw(folder: Path) -> Iterator[Path]:
    """An SVG of each chart for each theme."""
    for name, chart in CHARTS.items():
        for suffix, (paper, ink) in THEMES.items():
            with themed(paper, ink):
                figure = chart()
                path = folder / f"{name}{suffix}.svg"
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
                plt.close(figure)
            yield path


@contextmanager
def themed(paper: str, ink: str) -> Iterator[None]:
    coloured = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "axes.titlecolor")
    settings: dict[str, Any] = {
        "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper, "font.size": 10,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "blocksparse",
        **dict.fromkeys(coloured, ink),
    }  # fmt: skip
    with matplotlib.rc_context(settings):  # type: ignore[arg-type, unused-ignore]  # newer versions name every key
        yield

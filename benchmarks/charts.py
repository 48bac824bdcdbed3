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
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from benchmarks.results import Results

Line = tuple[str, str, list[tuple[float, float]]]  # name, colour, points
BLUE, ORANGE, GREEN, RED, GREY = "#3b82c4", "#d9822b", "#2a9d74", "#c8553d", "#8a8f98"
THEMES = {"": ("white", "#1f2328"), "-dark": ("#1e2129", "#e2e4e9")}  # paper, ink; the dark one is the site's


def speed_and_kl() -> Any:
    """What `auto` gains by length in a trained model, and its KL by kind of text."""
    found = Results.named("trained-auto")
    ticks = {8192: "8K", 16384: "16K", 32768: "32K", 65536: "64K", 131072: "128K"}

    def gain(method: str) -> list[tuple[float, float]]:
        rows = {N: f"qwen2.5-coder-1.5b, {tick}, {method}" for N, tick in ticks.items()}
        return [(N, found.cell(row, "speedup over dense")) for N, row in rows.items()]

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7))
    _lines(left, [("the bound", GREY, gain("no attention")), ("auto()", BLUE, gain("auto()"))])
    left.axhline(1, color=GREY, linewidth=1, linestyle="--")
    left.annotate(
        "dense attention", (131072, 1), xytext=(0, 4), textcoords="offset points", color=GREY, ha="right"
    )
    at_32k, at_128k = dict(gain("auto()"))[32768], dict(gain("auto()"))[131072]
    left.set(title=f"Gain: first token {at_32k:.2f}x faster\nat 32K tokens, {at_128k:.2f}x at 128K", ylim=(0, 4.3))
    left.set_ylabel("TTFT speedup over dense attention")
    _by_length(left, ticks)
    left.set_xlabel("prompt tokens (log); Qwen2.5-Coder-1.5B, H100")
    kinds = ("prose", "manual", "code", "chat")
    for shift, (name, colour, method) in enumerate(
        (("careful", GREEN, "auto('careful')"), ("the default", BLUE, "auto()"), ("fast", RED, "auto('fast')"))
    ):
        heights = [found.cell(f"qwen2.5-coder-1.5b, 32K, {method}", f"KL, {kind}") for kind in kinds]
        right.bar([x + 0.27 * (shift - 1) for x in range(4)], heights, 0.25, color=colour, label=name)
    right.set_xticks(range(4), kinds)
    right.set(title="Loss: KL of next tokens\nfrom dense attention at 32K", ylabel="nats")
    right.set_xlabel("kind of text; Qwen2.5-Coder-1.5B")
    right.legend(frameon=False)
    figure.tight_layout()
    return figure


def auto_front() -> Any:
    """KL of a 135M model against the time of attention, at every length, on a GPU and on a CPU."""
    model, on_cpu = map(Results.named, ("auto-model", "auto-cpu"))
    named = (
        ("auto", BLUE, "auto", "left"),
        ("mean_pooling, banded", ORANGE, "mean_pooling(block=128) with Band(128)", "below"),
        ("xattention, banded", GREY, "xattention(stride=8, block=64) with Band(128)", "high"),
        ("minference", GREEN, "minference", "high"),
        ("flash_prefill", RED, "flash_prefill", "low"),
    )

    def points(timed: Results, start: str, N: int) -> list[tuple[float, float]]:
        rows = [row for row in timed.rows if row.startswith(f"{start}, ") and timed.has(row, f"ms, {N}")]
        at = ((timed.cell(row, f"ms, {N}"), model.cell(row, f"KL, {N}")) for row in rows)
        return sorted(at, key=lambda point: point[1])

    figure, panels = plt.subplots(2, 3, figsize=(9.6, 6.4), sharey=True)
    shown = (
        *(("H100", model, N) for N in (4096, 7680, 16384, 32768)),
        *(("CPU", on_cpu, N) for N in (4096, 7680)),
    )
    for axes, (device, timed, N) in zip(panels.flat, shown, strict=True):
        for name, colour, start, at in named:
            if line := points(timed, start, N):
                axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=4, linewidth=2)
                place = "low" if at == "below" and device == "CPU" else at
                _named_at_an_end(axes, name, line[0] if at in ("low", "below") else line[-1], colour, place)
        dense = timed.cell("dense, -", f"ms, {N}")
        axes.axvline(dense, color=GREY, linewidth=1, linestyle="--")
        axes.set(xscale="log", yscale="log", title=f"{device}, {N} tokens", ylim=(0.003, 0.7))
        _named_at_an_end(axes, "dense attention", (dense, 0.5), GREY, "left")
        axes.set_xlim(left=axes.get_xlim()[0] * 0.8)
        ticks = [tick for tick in (10, 20, 40, 80, 160, 600, 1200, 2400, 5000, 10000, 20000) if _near(axes, tick)]
        axes.set_xticks(ticks, [f"{tick / 1000:g} s" if tick >= 600 else f"{tick} ms" for tick in ticks])
        axes.set_yticks([0.01, 0.03, 0.1], ["0.01", "0.03", "0.1"])
        axes.minorticks_off()
        axes.grid(alpha=0.2)
    for axes in panels[:, 0]:
        axes.set_ylabel("KL of next tokens, nats")
    figure.suptitle(
        "KL against attention time in a 135M model; lower and further left is better",
        x=0.01, ha="left", weight="bold", fontsize=11,
    )  # fmt: skip
    figure.tight_layout()
    return figure


def _named_at_an_end(axes: Any, name: str, end: tuple[float, float], colour: str, at: str) -> None:
    """A small name on the page's own ground: above to the right (`high`), below to the right (`low`), or left."""
    places = {
        "high": ((4, 3), "left", "bottom"),
        "low": ((5, -2), "left", "top"),
        "left": ((-3, -1), "right", "top"),
        "below": ((-4, -2), "right", "top"),
    }
    xytext, ha, va = places[at]
    paper = {"facecolor": plt.rcParams["axes.facecolor"], "edgecolor": "none", "pad": 0.6}
    axes.annotate(
        name, end, xytext=xytext, textcoords="offset points", color=colour, fontsize=7.5, ha=ha, va=va, bbox=paper
    )


def _near(axes: Any, tick: float) -> bool:
    low, high = axes.get_xlim()
    return bool(low <= tick <= high)


def pipeline() -> Any:
    """The four stages, and what each hands to the next."""
    size = 8
    generator = np.random.default_rng(3)
    weight = generator.random((size, size)) ** 3 + np.eye(size)  # a heavy diagonal
    weight[:, 0] += 0.9
    past = np.tri(size, dtype=bool)
    kept = past & (weight > 0.55)
    stages = (
        ("Permuter", "In which order\ndo tokens stand?", "Permutation"),
        ("Scorer", "What is each pair\nof blocks worth?", "BlockScores"),
        ("Selector", "Which pairs\nare kept?", "BlockMask"),
        ("Executor", "Attention over\nwhat is kept", "AttentionOutput"),
    )
    ink = plt.rcParams["text.color"]
    figure, axes = plt.subplots(figsize=(9.6, 2.6))
    axes.set(xlim=(-0.75, 8.55), ylim=(-1.4, 1.15), aspect="equal")
    axes.axis("off")
    arrow = {"arrowstyle": "-|>", "color": ink, "linewidth": 1.4}
    axes.text(-0.45, 0.6, "q, k", ha="center", va="center", fontsize=11)
    for i, (name, question, value) in enumerate(stages):
        x = 0.2 + 2.1 * i
        axes.add_patch(Rectangle((x, 0.1), 1.4, 1.0, facecolor=BLUE, alpha=0.18, edgecolor=BLUE))
        axes.text(x + 0.7, 0.87, name, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(x + 0.7, 0.42, question, ha="center", va="center", fontsize=8)
        axes.annotate("", (x, 0.6), xytext=(x - (0.45 if i == 0 else 0.7), 0.6), arrowprops=arrow)
        axes.text(x + 0.7, -0.12, value, ha="center", va="center", fontsize=8.5, color=GREY, family="monospace")
    for i in (1, 2):
        shown = weight / weight.max() if i == 1 else kept.astype(float)
        for row, column in zip(*np.nonzero(past), strict=True):
            corner = (0.4 + 2.1 * i + column / size, -0.35 - (row + 1) / size)
            strength = 0.12 + 0.88 * float(shown[row, column])
            axes.add_patch(Rectangle(corner, 0.92 / size, 0.92 / size, facecolor=ORANGE, alpha=strength))
    for place, token in enumerate(np.argsort(-weight.sum(0) % 0.37)):
        spot = 0.4 + place / size
        axes.add_patch(
            Rectangle((spot, -0.75), 0.9 / size, 0.25, facecolor=GREEN, alpha=0.15 + 0.1 * float(token))
        )
        axes.add_patch(Rectangle((6.7 + place / size, -0.75), 0.9 / size, 0.25, facecolor=BLUE, alpha=0.55))
    axes.text(8.4, 0.6, "out", ha="center", va="center", fontsize=11)
    axes.annotate("", (8.15, 0.6), xytext=(7.9, 0.6), arrowprops=arrow)
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
    "auto-front": auto_front,
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

"""Pictures of `results.json`: `python -m benchmarks.pictures results.json docs/pictures`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.peers import FA4, FLEX, OURS, PORTABLE
from benchmarks.report import STAGES, Row, mask_share, ms_of, rate_of, tokens

# Colours that people with any colour vision tell apart (Okabe and Ito), and a marker each.
STYLES: dict[str, tuple[str, str]] = {
    OURS: ("#0072B2", "o"),
    PORTABLE: ("#56B4E9", "o"),
    FLEX: ("#E69F00", "s"),
    FA4: ("#009E73", "^"),
}
OTHERS = (("#CC79A7", "D"), ("#D55E00", "v"), ("#000000", "P"))
# Of the table `eight_bit`: label (queries and keys, weights and values), colour, marker and line.
EIGHT_BIT: dict[str, tuple[str, str, str, str]] = {
    OURS: ("bf16", "#0072B2", "o", "-"),
    "fp8 kernel": ("int8, fp8: kernel", "#D55E00", "^", "-"),
    "fp8 call": ("int8, fp8: call", "#D55E00", "^", ":"),
    "bf16 kernel": ("int8, bf16: kernel", "#009E73", "s", "-"),
    "bf16 call": ("int8, bf16: call", "#009E73", "s", ":"),
}
STAGE_COLOURS = dict(zip(STAGES, ("#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#0072B2"), strict=True))

plt.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.dpi": 130,
    }
)


def rates(results: Row) -> Any:
    """TFLOP/s by density, a panel per head dim and length, a line per executor, under the roofs."""
    rows, roofs = results["tables"]["rates"], results.get("roofs") or {}
    head_dims = list(dict.fromkeys(row["D"] for row in rows))
    lengths = list(dict.fromkeys(row["N"] for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    sparse = [name for name in names if sum(rate_of(row, name) is not None for row in rows) > 1]
    lines = [name for name in sparse if not name.endswith("dense")]
    others = iter(OTHERS)
    styles = {name: STYLES.get(name) or next(others) for name in lines}
    size = (4.9 * len(lengths), 3.5 * len(head_dims) + 0.5)
    figure, panels = plt.subplots(len(head_dims), len(lengths), figsize=size, sharey=True, squeeze=False)
    for D, line in zip(head_dims, panels, strict=True):
        for N, axes in zip(lengths, line, strict=True):
            here = sorted((row for row in rows if (row["D"], row["N"]) == (D, N)), key=lambda row: row["density"])
            for name in lines:
                points = [(row["density"], rate) for row in here if (rate := rate_of(row, name)) is not None]
                colour, marker = styles[name]
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name, linewidth=2)
            dense = [(name, rate_of(row, name)) for row in here for name in names if name.endswith("dense")]
            for (name, rate), marker in zip(((n, r) for n, r in dense if r), "x+1", strict=False):
                axes.plot(1.0, rate, marker, color="0.25", markersize=8, markeredgewidth=1.8, label=name)
            if roofs:
                _roof(axes, here, roofs)
            axes.set(title=f"{tokens(N)} tokens, head dim {D}", ylim=(0, None))
            _by_density(axes)
    for axes in panels[-1]:
        axes.set_xlabel("density: kept share of dense causal attention")
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s over kept blocks")
    _legend_below(figure, panels)
    return figure


def _roof(axes: Any, rows: list[Row], roofs: Row) -> None:
    """The lower of two bounds: matrix products, and moving q, k, v and the output once."""
    densest = rows[-1]
    densities = [10 ** (-2.05 + 2.15 * i / 200) for i in range(201)]
    by_memory = [
        densest["tflop"] / densest["density"] * x / (densest["bytes"] / roofs["memory_tb_per_s"] * 1e-12)
        for x in densities
    ]
    bound = [min(roofs["matmul_tflops"], y) for y in by_memory]
    axes.plot(densities, bound, color="0.45", linestyle="--", linewidth=1.4, label="measured roof")
    axes.fill_between(densities, bound, 1.12 * max(bound), color="0.93", zorder=0)


def eight_bit(results: Row) -> Any:
    """TFLOP/s by density, a panel per length: bf16, and 8 bits as kernels and as whole calls."""
    rows = [row for row in results["tables"]["eight_bit"] if rate_of(row, OURS) is not None]
    lengths = list(dict.fromkeys(row["N"] for row in rows))
    size = (4.9 * max(1, len(lengths)), 4.0)
    figure, panels = plt.subplots(1, max(1, len(lengths)), figsize=size, sharey=True, squeeze=False)
    for N, axes in zip(lengths, panels[0], strict=False):
        for name, (label, colour, marker, line) in EIGHT_BIT.items():
            here = [(row, rate) for row in rows if row["N"] == N and (rate := rate_of(row, name)) is not None]
            if points := sorted((row["density"], rate) for row, rate in here):
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=label)
        axes.set(title=f"{tokens(N)} tokens, head dim {rows[0]['D']}")
        _by_density(axes, least=0.04)
        axes.set_xlabel("density: kept share of dense causal attention")
    panels[0][0].set(ylabel="TFLOP/s over kept blocks", ylim=(0, None))  # last: all panels share it
    _legend_below(figure, panels)
    return figure


def _by_density(axes: Any, least: float = 0.009) -> None:
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1%", "3%", "10%", "30%", "100%"])
    axes.set_xlim(least, 1.15)
    axes.xaxis.minorticks_off()
    axes.grid(axis="y", alpha=0.25)


def stages(results: Row) -> Any:
    """Milliseconds of each stage, a panel per length, a bar per preset."""
    rows = [row for row in results["tables"]["stages"] if ms_of(row, "attend") is not None]
    lengths = list(dict.fromkeys(row["N"] for row in rows))
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(4.3 * len(lengths), 0.42 * len(presets) + 1.7), sharey=True, squeeze=False
    )
    for N, axes in zip(lengths, panels[0], strict=True):
        here = {row["preset"]: row for row in rows if row["N"] == N}
        longest = max(sum(_parts(row).values()) for row in here.values())
        for place, preset in enumerate(presets):
            if (row := here.get(preset)) is None:
                axes.text(0, place, " not measured", va="center", color="0.5", fontsize=8)
                continue
            left = 0.0
            for stage, ms in _parts(row).items():
                axes.barh(
                    place, ms, left=left, height=0.68, color=STAGE_COLOURS[stage], label=_named(stage, place)
                )
                left += ms
            at_end = f"{row['density']:.2f}, {mask_share(row):.0%}"
            axes.text(left + 0.015 * longest, place, at_end, va="center", fontsize=8, color="0.3")
        axes.set(title=f"{tokens(N)} tokens", xlim=(0, 1.22 * longest))
        axes.set_xlabel("ms; at the end: density, mask building / attend")
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    panels[0][0].set_yticks(range(len(presets)), presets)
    panels[0][0].invert_yaxis()
    _legend_below(figure, panels)
    return figure


def _parts(row: Row) -> dict[str, float]:
    """Milliseconds that add up to the call: attending without the lists that the executor builds first."""
    ms = {stage: ms_of(row, stage) or 0.0 for stage in STAGES}
    ms["attend"] = max(0.0, ms["attend"] - ms["plan"])
    return ms


def _named(stage: str, place: int) -> str:
    return stage if place == 0 else "_"


def growth(results: Row) -> Any:
    """Nanoseconds a kept block, and memory, by length."""
    rows = [row for row in results["tables"]["growth"] if row.get("kept_blocks")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 3.9))
    lengths = [row["N"] for row in rows]
    for name, colour, marker in (("kernel", "#0072B2", "o"), ("whole call", "#D55E00", "s")):
        points = [
            (row["N"], ms * 1e6 / row["kept_blocks"]) for row in rows if (ms := ms_of(row, name)) is not None
        ]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=2, label=name)
    kernel = {row["N"]: ms * 1e6 / row["kept_blocks"] for row in rows if (ms := ms_of(row, "kernel")) is not None}
    base = kernel.get(32768)
    if base is not None:
        left.axhspan(base / 1.15, base * 1.15, color="#0072B2", alpha=0.1, label="15 % around the kernel at 32K")
    left.set(ylabel="ns a kept block of 128 x 128", ylim=(0, None), title="Time")
    calls = [(row["N"], ms / 1e3) for row in rows if (ms := ms_of(row, "whole call")) is not None]
    if calls:
        right.plot(*zip(*calls, strict=True), color="#D55E00", marker="s", linewidth=2, label="whole call, s")
    memory = [(row["N"], row["extra_bytes"] / 2**30) for row in rows if row.get("extra_bytes")]
    if memory:
        right.plot(*zip(*memory, strict=True), color="#009E73", marker="^", linewidth=2, label="extra memory, GiB")
    right.set(yscale="log", title="Whole call; memory beyond q, k, v and the output", ylabel="s, GiB")
    right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens (below: density)")
        axes.set_xticks(lengths, [f"{tokens(row['N'])}\n{row['density']:.2f}" for row in rows])
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend()
    figure.tight_layout()
    return figure


def _legend_below(figure: Any, panels: Any) -> None:
    """One legend for all panels, each entry once."""
    found: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    lines = max(1, -(-len(found) // 5))
    figure.tight_layout(rect=(0, (0.15 + 0.21 * lines) / figure.get_figheight(), 1, 1))
    figure.legend(found.values(), found.keys(), loc="lower center", ncols=max(1, -(-len(found) // lines)))


PICTURES: dict[str, Callable[[Row], Any]] = {
    "rates": rates,
    "eight_bit": eight_bit,
    "stages": stages,
    "growth": growth,
}


def draw(results: Row, folder: Path) -> list[Path]:
    """A PNG for each table that has a picture and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, picture in PICTURES.items():
        if results["tables"].get(name):
            figure = picture(results)
            made.append(folder / f"{name}.png")
            figure.savefig(made[-1])
            plt.close(figure)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for path in draw(json.loads(arguments.results.read_text(encoding="utf-8")), arguments.folder):
        print(path)


if __name__ == "__main__":
    main()

"""Markdown of `results.json`: `python -m benchmarks.report results.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import EMPTY_LAUNCHES
from benchmarks.peers import FLEX, OURS, PORTABLE

Row = dict[str, Any]

NONE = "-"
STAGES = ("permute", "score", "select", "plan", "attend")
STEPS, CALLS = ("index", "rank", "attend"), ("whole call", "cuDNN dense")  # s2o


def tokens(N: int) -> str:
    """8192 is 8K."""
    return f"{N >> 20}M" if N % (1 << 20) == 0 else f"{N >> 10}K" if N % 1024 == 0 else str(N)


def ms_of(row: Row, name: str) -> float | None:
    """Milliseconds of one figure of a row, or None."""
    ms: float | None = row.get("figures", {}).get(name, {}).get("ms")
    return ms


def rate_of(row: Row, name: str) -> float | None:
    """TFLOP/s over kept blocks."""
    ms = ms_of(row, name)
    return None if ms is None else row["tflop"] / ms * 1e3


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def cell(x: float | None, digits: int) -> str:
    return NONE if x is None else f"{x:.{digits}f}"


def milliseconds(x: float | None) -> str:
    """Three digits that count."""
    return (
        NONE
        if x is None
        else f"{x:.3f}"
        if x < 1
        else f"{x:.2f}"
        if x < 10
        else f"{x:.1f}"
        if x < 100
        else f"{x:.0f}"
    )


def gibibytes(x: float | None) -> str:
    return NONE if x is None else f"{x / 2**30:.2f}"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Rows and columns in Markdown, without the columns in which nobody has anything."""
    head, rows = list(head), [list(row) for row in body]
    kept = [i for i in range(len(head)) if any(row[i] != NONE for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line[i] for i in kept) + " |" for line in lines)


def notes(rows: list[Row]) -> str:
    """Why figures are missing, each reason once."""
    found: dict[str, None] = {}
    for row in rows:
        where = row.get("preset") or row.get("method") or ""
        reasons: Row = {where: row, **row.get("figures", {})}
        for name, given in reasons.items():
            if why := given.get("why"):
                at = f"{tokens(row['N'])} tokens" if "N" in row else ""
                found.setdefault(
                    f"- {name}: {why}"
                    if "not installed" in why or "No module" in why
                    else f"- {name}, {at}: {why}"
                )
    return "\n".join(found)


def head_dims(row: Row) -> str:
    """192/128 where values have another head dim than keys, else one number."""
    D, Dv = row["D"], row.get("Dv", row["D"])
    return str(D) if Dv == D else f"{D}/{Dv}"


def rates(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    ours, others = OURS, [name for name in names if name not in (OURS, PORTABLE)]
    head = [
        "tokens",
        "head dim",
        "density",
        *names,
        *(f"ours / {name}" for name in others),
        "portable / FlexAttention",
    ]
    body = []
    for row in rows:
        rate = {name: rate_of(row, name) for name in names}
        body.append(
            [tokens(row["N"]), head_dims(row), cell(row["density"], 3)]
            + [cell(rate[name], 0) for name in names]
            + [cell(ratio(rate[ours], rate[name]), 2) for name in others]
            + [cell(ratio(rate[PORTABLE], rate.get(FLEX)), 2)]
        )
    return table(head, body)


def blocks(rows: list[Row]) -> str:
    body, whole = [], {}
    for row in rows:
        # The first of each length, head dim and density wanted is what the finer ones are compared with.
        rate = {name: rate_of(row, name) for name in (OURS, PORTABLE)}
        if (row["q_block"], row["k_block"]) == (rows[0]["q_block"], rows[0]["k_block"]):
            whole = rate
        body.append(
            [tokens(row["N"]), str(row["D"]), f"{row['q_block']}x{row['k_block']}", cell(row["density"], 3)]
            + [cell(rate[name], 0) for name in rate]
            + [cell(ratio(rate[name], whole[name]), 2) for name in rate]
        )
    coarse = f"{rows[0]['q_block']}x{rows[0]['k_block']}"
    head = ["tokens", "head dim", "blocks", "density", OURS, PORTABLE, f"ours / {coarse}", f"portable / {coarse}"]
    return table(head, body)


def windows(rows: list[Row]) -> str:
    body = []
    plain = {(row["D"], row["layer"]): rate_of(row, OURS) for row in rows}
    for row in rows:
        ours, portable, flex = (rate_of(row, peer) for peer in (OURS, PORTABLE, FLEX))
        heads = f"{row['D']}, {row['Hq']}/{row['Hkv']}"
        ratios = (cell(ratio(ours, other), 2) for other in (plain.get((row["D"], row["plain"])), portable, flex))
        body.append([heads, row["layer"], cell(row["density"], 3), cell(ours, 0), *ratios])
    others = ["rate, plain mask = 1", "speedup over the portable kernel", "speedup over FlexAttention"]
    return table(["head dim, heads", "mask", "density", "TFLOP/s", *others], body)


def eight_bit(rows: list[Row]) -> str:
    body = []
    for row in rows:
        exact = [rate_of(row, OURS), rate_of(row, f"{OURS} call")]
        for values in ("fp8", "bf16"):
            ours = [rate_of(row, f"{values} {part}") for part in ("kernel", "call")]
            point = [tokens(row["N"]), cell(row.get("density"), 3), values]
            ratios = [ratio(x, y) for x, y in zip(ours, exact, strict=True)]
            rates = [*(cell(x, 0) for x in (*exact, *ours)), *(cell(x, 2) for x in ratios)]
            rest = [milliseconds(ms_of(row, f"{values} rounding")), cell(row.get("l1", {}).get(values), 4)]
            body.append([*point, *rates, *rest])
    head = [
        "tokens",
        "density",
        "weights and values",
        "bf16, kernel",
        "whole call",
        "8 bits, kernel",
        "whole call",
    ]
    return table([*head, "kernel / bf16", "call / bf16", "rounding, ms", "relative L1"], body)


def whole_blocks(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.get("figures", {})))
    body = []
    for row in rows:
        rate = {name: rate_of(row, name) for name in names}
        theirs = [x for name in ("cuDNN", "cuDNN, rows split") if (x := rate.get(name)) is not None]
        best = max(theirs, default=None)
        point = [*(str(row[name]) for name in ("heads", "N", "D", "block")), f"{row['kept']} of {row['of']}"]
        ratios = [ratio(rate.get(OURS), best), ratio(rate.get("Int8Executor"), rate.get("cuDNN, fp8"))]
        errors = [row.get("l1", {}).get(name) for name in ("Int8Executor", "cuDNN, fp8")]
        body.append(
            [*point, *(cell(rate[name], 0) for name in names), *(cell(x, 2) for x in ratios)]
            + [cell(x, 4) for x in errors]
        )
    head = ["heads", "tokens", "head dim", "blocks", "kept", *names, "ours / cuDNN's better", "8 bits / fp8"]
    return table([*head, "relative L1, 8 bits", "relative L1, fp8"], body)


def gather(rows: list[Row]) -> str:
    names = (OURS, "gather", "portable gather", "GatherExecutor")
    body = []
    for row in rows:
        rate = [rate_of(row, name) for name in names]
        point = [tokens(row["N"]), str(row["maps"]), cell(row.get("density"), 3), *(cell(x, 0) for x in rate)]
        body.append([*point, *(cell(ratio(x, rate[0]), 2) for x in rate[1:])])
    ratios = ["gather / contiguous", "portable / contiguous", "whole call / contiguous"]
    head = ["tokens", "maps", "density", f"{OURS}, contiguous", "gather, kernel", "portable, kernel"]
    return table([*head, "GatherExecutor, whole call", *ratios], body)


def s2o(rows: list[Row]) -> str:
    body = []
    for row in rows:
        index, rank, attend = (ms_of(row, name) for name in STEPS)
        share = ratio(index, attend)
        point = [tokens(row["N"]), row["method"], f"{row['tau']:g}", cell(row.get("density"), 3)]
        times = [*(milliseconds(x) for x in (index, rank, attend)), NONE if share is None else f"{share:.0%}"]
        calls = [*(milliseconds(ms_of(row, name)) for name in CALLS), cell(times_dense(row), 2)]
        body.append([*point, cell(row.get("l1"), 4), *times, *calls, gibibytes(row.get("extra_bytes"))])
    head = ["tokens", "maps", "tau", "density", "relative L1", *STEPS, "index / attend", *CALLS]
    parts = table([*head, "speedup over dense", "extra GiB"], body), "\n".join(_fastest_near(rows, 0.05))
    return "\n\n".join(part for part in parts if part)


def times_dense(row: Row) -> float | None:
    """Time of dense attention over that of a whole call."""
    whole, dense = (ms_of(row, name) for name in CALLS)
    return ratio(dense, whole)


def _fastest_near(rows: list[Row], error: float) -> list[str]:
    """A line for each length: which call is the fastest among those whose relative L1 is at most `error`."""
    lines = []
    for N in dict.fromkeys(row["N"] for row in rows):
        near = [row for row in rows if row["N"] == N and times_dense(row) is not None and row["l1"] <= error]
        if best := max(near, key=lambda row: times_dense(row) or 0.0, default=None):
            what = f"{best['method']}, tau {best['tau']:g}, {times_dense(best):.2f}x faster than dense"
            lines.append(f"- Fastest with a relative L1 of at most {error:g}, {tokens(N)} tokens: {what}.")
    return lines


def mask_building(row: Row) -> float | None:
    """Milliseconds of permuting, scoring and selecting."""
    parts = [ms_of(row, name) for name in STAGES[:3]]
    return None if None in parts else sum(x for x in parts if x is not None)


def mask_share(row: Row) -> float | None:
    """Time of building the mask over time of attending, block lists included."""
    return ratio(mask_building(row), ms_of(row, "attend"))


def stages(rows: list[Row]) -> str:
    head = ["tokens", "preset", "density", *STAGES, "mask building", "of attend", "extra GiB"]
    body = []
    for row in rows:
        building, share = mask_building(row), mask_share(row)
        body.append(
            [tokens(row["N"]), row["preset"], cell(row.get("density"), 3)]
            + [milliseconds(ms_of(row, name)) for name in STAGES]
            + [
                milliseconds(building),
                NONE if share is None else f"{share:.0%}",
                gibibytes(row.get("extra_bytes")),
            ]
        )
    return table(head, body)


def fastest_dense(rows: list[Row], N: int) -> Row | None:
    """The row of the fastest dense attention at this length."""
    dense = [row for row in rows if row["N"] == N and row["dense"] and row.get("ms") is not None]
    return min(dense, key=lambda row: row["ms"], default=None)


def calls(rows: list[Row]) -> str:
    body = []
    for row in rows:
        best = fastest_dense(rows, row["N"])
        speedup = None if best is None else ratio(best["ms"], row.get("ms"))
        times = [milliseconds(row.get("ms")), cell(speedup, 2)]
        rest = [gibibytes(row.get("extra_bytes")), row.get("ran", NONE)]
        body.append([tokens(row["N"]), row["method"], cell(row.get("density"), 3), *times, *rest])
    return table(["tokens", "call", "density", "ms", "speedup over dense", "extra GiB", "what ran"], body)


def growth(rows: list[Row]) -> str:
    body = []
    for row in rows:
        kernel, whole, kept = ms_of(row, "kernel"), ms_of(row, "whole call"), row.get("kept_blocks")
        per_block = [None if ms is None or not kept else ms * 1e6 / kept for ms in (kernel, whole)]
        point = [tokens(row["N"]), cell(row.get("density"), 3), NONE if kept is None else f"{kept:,}"]
        times = [milliseconds(kernel), milliseconds(whole), *(cell(x, 2) for x in per_block)]
        body.append([*point, *times, cell(rate_of(row, "kernel"), 0), gibibytes(row.get("extra_bytes"))])
    head = ["tokens", "density", "kept blocks", "kernel, ms", "call, ms", "kernel, ns a block", "call, ns a block"]
    return table([*head, "kernel, TFLOP/s", "extra GiB"], body)


def crossover(rows: list[Row]) -> str:
    others = list(dict.fromkeys(name for row in rows for name in row["figures"] if name != "dense"))
    body = []
    for row in sorted(rows, key=lambda row: (row["dtype"], row["operations"])):
        dense = ms_of(row, "dense")
        work = [str(row["Hq"]), tokens(row["M"]), tokens(row["N"]), row["dtype"], f"{row['operations']:.1e}"]
        body.append([*work, milliseconds(dense), *(cell(ratio(dense, ms_of(row, name)), 2) for name in others)])
    head = ["query heads", "queries", "keys", "dtype", "operations", "dense, ms"]
    return table([*head, *(f"{name}, speedup over dense" for name in others)], body)


def serving(rows: list[Row]) -> str:
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    counted = {shape(row): row for row in parts.get("launches", [])}
    made = [row for row in parts.get("calls", []) if "figures" in row]
    tables = (
        _served(made),
        "\n".join(_missed(made)),
        _hosts(made, counted),
        _packed(made),
        _graphs(parts.get("graph", [])),
        _gpu_work(parts.get("stages", [])),
    )
    return "\n\n".join(part for part in tables if part)


def shape(row: Row) -> str:
    """32/8 heads, 2K of 128K: query heads, KV heads, and the tokens of each prompt."""
    keys = row["keys"]
    alike = f"{len(keys)} x {tokens(keys[0])}" if len(set(keys)) == 1 else " + ".join(map(tokens, keys))
    length = tokens(keys[0]) if len(keys) == 1 else alike
    chunk = "" if row["queries"] is None else f"{tokens(row['queries'])} of "
    return f"{row['Hq']}/{row['Hkv']} heads, {chunk}{length}" + (
        "" if head_dims(row) == "128" else f", head dim {head_dims(row)}"
    )


def _fastest(row: Row) -> str | None:
    """The fastest dense call."""
    found = {name: ms for name in row["dense"] if (ms := ms_of(row, name)) is not None}
    return min(found, key=lambda name: found[name], default=None)


def _must(row: Row, figure: str, over: str) -> float | None:
    """The least that the time of `over` has to be in terms of the figure's."""
    wanted = (m["least"] for m in row["must"] if (m["figure"], m["over"]) == (figure, over))
    return next(wanted, None)


def _served(rows: list[Row]) -> str:
    body = []
    for row in rows:
        best = _fastest(row)
        dense = None if best is None else ms_of(row, best)
        line = [shape(row), cell(row["density"], 3), milliseconds(dense), NONE if best is None else best]
        for name in ("pbs_attn", "mean_pooling", "AutoExecutor", "auto"):
            line += [milliseconds(ms_of(row, name)), cell(ratio(dense, ms_of(row, name)), 2)]
            if name in ("pbs_attn", "AutoExecutor"):
                line.append(cell(_must(row, name, "dense"), 2))
        body.append(line)
    head = ["shape", "density", "dense, ms", "which", "pbs_attn, ms", "speedup over dense", "must"]
    head += [
        "mean_pooling, ms",
        "speedup over dense",
        "AutoExecutor, ms",
        "speedup over dense",
        "must",
        "auto, ms",
        "speedup over dense",
    ]
    return table(head, body) if body else ""


def _missed(rows: list[Row]) -> list[str]:
    """A line for each target of a row that its times do not meet."""
    lines = []
    for row in rows:
        for must in row["must"]:
            over = _fastest(row) if must["over"] == "dense" else must["over"]
            found = None if over is None else ratio(ms_of(row, over), ms_of(row, must["figure"]))
            if found is not None and found < must["least"]:
                what = f"{must['figure']} {found:.2f} times {over}, must be {must['least']:.2f}"
                lines.append(f"- Missed, {shape(row)}: {what}.")
    return lines


def _hosts(rows: list[Row], counted: dict[str, Row]) -> str:
    body = []
    for row in rows:
        for name in ("pbs_attn", "mean_pooling", "AutoExecutor", "auto"):
            work = counted.get(shape(row), {}).get("figures", {}).get(name, {})
            figure, launches = row["figures"].get(name, {}), work.get("launches")
            host, empty = figure.get("host_ms"), figure.get("empty_ms")
            nothing = None if launches is None or empty is None else empty * launches / EMPTY_LAUNCHES
            must = ratio(1.0, _must(row, name, "empty kernels"))
            times = [milliseconds(host), milliseconds(work.get("ms")), cell(launches, 0), milliseconds(nothing)]
            body.append([shape(row), name, *times, cell(ratio(host, nothing), 1), cell(must, 1)])
    head = ["shape", "call", "host, ms", "GPU at work, ms", "launches", "as many empty kernels, ms"]
    return table([*head, "host / empty", "must"], body) if body else ""


def _packed(rows: list[Row]) -> str:
    single = "pbs_attn, one by one"
    body = []
    for row in rows:
        for name in row["figures"] if single in row["figures"] else ():
            if name.startswith("pbs_attn") and name != single:
                share = ratio(ms_of(row, single), ms_of(row, name))
                times = [milliseconds(ms_of(row, x)) for x in (name, single)]
                body.append([shape(row), name, *times, cell(share, 2), cell(_must(row, name, single), 2)])
    head = ["shape", "packed", "ms", "one by one, contiguous, ms", "share of its rate", "must"]
    return table(head, body) if body else ""


def _graphs(rows: list[Row]) -> str:
    body = []
    for row in rows:
        plain, graph = (ms_of(row, name) for name in ("pbs_attn", "pbs_attn, CUDA graph"))
        body.append([shape(row), milliseconds(plain), milliseconds(graph), cell(ratio(plain, graph), 2)])
    return table(["shape", "pbs_attn, ms", "as a CUDA graph, ms", "times the plain call"], body) if body else ""


def _gpu_work(rows: list[Row]) -> str:
    body = []
    for row in rows:
        for stage, work in row.get("figures", {}).items():
            found = list(work.get("kernels", {}).items())[:4]
            names = "; ".join(f"{name[:40]} {n} x {milliseconds(ratio(ms, n or None))}" for name, (n, ms) in found)
            times = [milliseconds(work.get("ms")), cell(work.get("launches"), 0)]
            body.append([shape(row), row["preset"], stage, *times, names.replace("|", "/") or NONE])
    head = ["shape", "preset", "stage", "GPU at work, ms", "launches", "the longest kernels, launches x ms"]
    return table(head, body) if body else ""


def cpu(rows: list[Row]) -> str:
    body: list[list[str]] = []
    names = list(dict.fromkeys(name for row in rows for name in row["figures"] if name != "dense"))
    for row in rows:
        dense, *others = (ms_of(row, name) for name in ("dense", *names))
        times = [x for other in others for x in (milliseconds(other), cell(ratio(dense, other), 2))]
        point = [tokens(row["N"]), str(row["D"]), str(row["block"]), row["dtype"], cell(row["density"], 2)]
        body.append([*point, milliseconds(dense), *times])
    head = [x for name in names for x in (f"{name}, ms", "speedup over SDPA")]
    runs_by = " and ".join(sorted({row["runs_by"] for row in rows}))
    made = table(["tokens", "D", "block", "dtype", "density", "dense SDPA, ms", *head], body)
    return f"{made}\n\n`CpuExecutor` runs by {runs_by}."


def audit(rows: list[Row]) -> str:
    names, body = ("call", "counted", "audited"), []
    for row in rows:
        share = row.get("share")
        times = [milliseconds(ms_of(row, name)) for name in names]
        point = [tokens(row["N"]), row["preset"], cell(row.get("density"), 3)]
        body.append([*point, *times, NONE if share is None else f"{share:.2%}"])
    head = ["tokens", "preset", "density", "call, ms", "counted, not audited, ms", "audited, ms"]
    return table([*head, "cost of auditing one call in 64"], body)


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "rates": ("Kernel rates, TFLOP/s over kept blocks", rates),
    "wide": ("Head dims above 128, TFLOP/s over kept blocks", rates),
    "blocks": ("Finer blocks, TFLOP/s over kept blocks", blocks),
    "windows": ("Windows, sinks and softcaps, TFLOP/s over kept blocks", windows),
    "eight_bit": ("8 bits, TFLOP/s over kept blocks", eight_bit),
    "whole_blocks": ("Not causal, in whole blocks, TFLOP/s over kept blocks", whole_blocks),
    "gather": ("Keys through index maps, TFLOP/s over visited blocks", gather),
    "stages": ("Stages, ms", stages),
    "s2o": ("S2O, ms", s2o),
    "calls": ("Whole calls", calls),
    "growth": ("Growth", growth),
    "serving": ("Calls of servers", serving),
    "crossover": ("When selecting saves time", crossover),
    "audit": ("Audits of 64 queries of each head", audit),
    "cpu": ("On a CPU", cpu),
}


def markdown(results: Row) -> str:
    """Every table of the results, with the reasons why figures are missing."""
    environment, roofs = results["environment"], results.get("roofs") or {}
    parts = [", ".join(f"{name} {value}" for name, value in environment.items())]
    if roofs:
        parts.append(
            f"Measured roofs: {roofs['matmul_tflops']:.0f} TFLOP/s of bf16 matrix products, "
            f"{roofs['memory_tb_per_s']:.2f} TB/s of copying."
        )
    for name, (title, show) in TABLES.items():
        if rows := results["tables"].get(name):
            parts += [f"## {title}", show(rows), notes(rows)]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    print(markdown(json.loads(parser.parse_args().results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()

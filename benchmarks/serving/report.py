"""Tables of what `python -m benchmarks.serving` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.tasks.paired import difference

LEAST = 0.98  # of the speed of unmodified vLLM, with short prompts
Line = dict[str, Any]


def row(case: str, times: Mapping[str, Sequence[float]]) -> str:
    """Medians of all but the first round, as a row of a table. The first engine is the one of the comparison."""
    before, *others = (median(seconds[1:] or seconds) for seconds in times.values())
    ratios = " / ".join(f"{before / after:.2f}{' (below .98)' * (before / after < LEAST)}" for after in others)
    first = " / ".join(f"{x[0] / median(x[1:] or x):.2f}" for x in times.values())
    return f"| {case} | " + " | ".join(f"{x:.3f}" for x in (before, *others)) + f" | {ratios} | {first} |"


def load_line(line: Line) -> str:
    """A row of the table of loads."""
    ttft, itl = line["ttft_ms"], line["itl_ms"]
    cells = [f"{line['rate']:g}", line["engine"], f"{line['finished']} of {line['requests']}"]
    cells += [f"{line['requests_per_s']:.2f}", *(f"{x:.0f}" for x in ttft.values())]
    return f"| {' | '.join([*cells, *(f'{x:.2f}' for x in itl.values())])} |"


def tables(lines: Sequence[Line]) -> str:
    """A section for each run, which begins with its options."""
    parts: list[str] = []
    starts = [i for i, line in enumerate(lines) if line["kind"] == "options"]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        options, run = lines[start], lines[start + 1 : stop]
        how = "compiled with CUDA graphs" if options["compiled"] else "eager"
        model = options["model"] or "random weights"
        engines = [line for line in run if line["kind"] == "engine"]
        parts += [f"### {model}, {how}{', YaRN' * bool(options['yarn'])}, {options['date']}\n"]
        parts += [f"{engines[0]['versions']}\n" if engines else ""]
        for some in (_cases, _tasks, _loads):
            if found := list(some(run)):
                parts += [*found, ""]
        parts += [
            f"{line['kind']} {_said(line)}" for line in run if line["kind"] in ("density", "counters", "limit")
        ]
    return "\n".join(parts)


def _cases(run: Sequence[Line]) -> Iterator[str]:
    cases = [line for line in run if line["kind"] == "case"]
    if cases:
        names = list(cases[0]["seconds"])
        yield "| prompts | " + " | ".join(f"{name}, s" for name in names) + " | speedup | first / later |"
        yield "|---" * (len(names) + 3) + "|"
        yield from (row(line["case"], line["seconds"]) for line in cases)


def _tasks(run: Sequence[Line]) -> Iterator[str]:
    answered = [line for line in run if line["kind"] == "task"]
    if not answered:
        return
    yield "| tokens | engine | tasks, % | from unmodified vLLM, points (95 %) | n |"
    yield "|---|---|---|---|---|"
    stock, *others = dict.fromkeys(line["engine"] for line in answered)
    for tokens in dict.fromkeys(line["tokens"] for line in answered):
        scores = {(line["engine"], line["task"]): line["scores"] for line in answered if line["tokens"] == tokens}
        # Tasks that every engine answered, so that all rows are of the same prompts.
        tasks = [task for name, task in scores if name == stock and all((name, task) in scores for name in others)]
        before = [score for task in tasks for score in scores[stock, task]]
        for name in (stock, *others) if before else ():
            mine = [score for task in tasks for score in scores[name, task]]
            gap = difference(mine, before)
            apart = f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
            score = f"{100 * sum(mine) / len(mine):.1f}"
            yield f"| {tokens} | {name} | {score} | {'-' if name == stock else apart} | {len(mine)} |"
        left = [task for name, task in scores if name == stock and task not in tasks]
        yield f"| {tokens} | left out: {', '.join(left) or 'none'} | | | |"


def _loads(run: Sequence[Line]) -> Iterator[str]:
    loads = [line for line in run if line["kind"] == "load"]
    if loads:
        yield (
            "| requests/s offered | engine | finished | requests/s | TTFT p50, ms | p95 | p99 | "
            "inter-token p50, ms | p99 |"
        )
        yield "|---" * 9 + "|"
        yield from map(load_line, loads)


def _said(line: Line) -> str:
    return ", ".join(f"{key} {value}" for key, value in line.items() if key != "kind")

"""What users lose: `python -m benchmarks.tasks`. Every preset at three settings on tasks like RULER's.

Dense attention is measured first, and only tasks in which it scores over 60 % are run for the others. Results are
written after each method, and a second run goes on from there. On one H200 about 15 minutes for 4096 and 7680
tokens; on a CPU choose --tokens 2048, few samples and few methods. With --report tables and the picture are made.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict

from benchmarks.quality import smollm2, with_yarn
from benchmarks.tasks.generators import TASKS
from benchmarks.tasks.measure import Texts, attention_ms, measure
from benchmarks.tasks.methods import CEILING, DENSE, methods, plans
from benchmarks.tasks.report import report
from benchmarks.tasks.sample import Haystack, Sample
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import Model, load

CAN = 0.6  # what dense attention must score in a task
WINDOWS_FROM = 0.5  # texts for KL and perplexity come from the second half, prompts of tasks from the first


def samples_of(haystack: Haystack, tokens: int, count: int, seed: int) -> dict[str, list[Sample]]:
    """Samples of every task; each has a seed of its own, so more samples begin with the same ones."""
    return {
        task: [make(haystack, random.Random(f"{task} {tokens} {seed} {i}"), tokens) for i in range(count)]
        for task, make in TASKS.items()
        if count
    }


def windows(model: Model, text: str, tokens: int, count: int) -> list[torch.Tensor]:
    """Equal shares of the second half of a text, `[1, tokens]` from the start of each."""
    ids = model.tokenizer.encode(text[int(len(text) * WINDOWS_FROM) :], add_special_tokens=False)
    if len(ids) < tokens * count:
        raise SystemExit(f"the text gives {len(ids)} tokens, and {tokens * count} are needed: take fewer windows")
    starts = [len(ids) * i // count for i in range(count)]
    return [torch.tensor([ids[start : start + tokens]]) for start in starts]


def about(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """What rows must share to be compared."""
    names = ("samples", "seed", "windows", "positions", "block", "batch")
    return {"model": model.name, "text": options.text.name, **{name: getattr(options, name) for name in names}}


def run(model: Model, tokens: int, options: argparse.Namespace, done: list[dict[str, Any]], until: float) -> None:
    """Every method at one length; appends to `done` and writes it."""
    text = options.text.read_text(encoding="utf-8")
    haystack = Haystack(model.tokenizer, text[: int(len(text) * WINDOWS_FROM)])
    samples = samples_of(haystack, tokens, options.samples, options.seed)
    texts = Texts.of(model, windows(model, text, tokens, options.windows), options.positions)
    every = [*methods(options.block, options.band), *plans(options.plan, model.network)]
    if options.methods:
        names = [DENSE, *options.methods]
        if unknown := set(options.methods) - {m.preset for m in every}:
            raise SystemExit(f"--methods knows {sorted({m.preset for m in every})}, not {sorted(unknown)}")
        every = sorted((m for m in every if m.preset in names), key=lambda m: names.index(m.preset))
    mine = [row for row in done if row["tokens"] == tokens]
    if any(row[what] != value for row in mine for what, value in about(model, options).items()):
        raise SystemExit(f"{options.out} was begun with other options: remove it, or give another name with --out")
    for method in every:
        row = next((r for r in mine if (r["preset"], r["setting"]) == (method.preset, method.setting)), None)
        timed = options.times and method.preset != CEILING  # which nobody attends with
        if row is not None and (row["attention_ms"] is not None or not timed):
            continue
        if time.monotonic() > until:
            print("the time is over; the same command goes on from here", flush=True)
            return
        if row is None:
            dense = next((r for r in mine if r["preset"] == DENSE), None)
            if dense is not None:
                able = {task for task, some in dense["scores"].items() if sum(some) / len(some) > CAN}
                samples = {task: some for task, some in samples.items() if task in able}
            row = {**asdict(measure(model, method, samples, texts)), **about(model, options)}
            mine.append(row)
            done.append(row)
        if timed:
            row["attention_ms"] = attention_ms(model, method, texts, batch=options.batch, repeats=options.repeats)
        unfinished = options.out.with_name(options.out.name + ".unfinished")
        unfinished.write_text(json.dumps(done, indent=1), encoding="utf-8")
        unfinished.replace(options.out)  # so that a run that is killed leaves whole results behind
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """One line for a result."""
    means = "  ".join(f"{task} {sum(some) / len(some):.2f}" for task, some in row["scores"].items())
    ms = "" if row["attention_ms"] is None else f" {row['attention_ms']:.1f} ms"
    return (
        f"{row['tokens']:6} {row['preset']:28} {row['setting']:22} density {row['density']:.3f} "
        f"KL {row['kl']:.4f} ppl {row['perplexity']:.2f}{ms}  {means}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a transformers model; SmolLM2 if not given")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 7680])
    parser.add_argument("--yarn-tokens", type=int, nargs="*", default=[], help="lengths to read with YaRN x 4")
    parser.add_argument("--samples", type=int, default=32, help="of each task; with 0 only texts are read")
    parser.add_argument("--windows", type=int, default=3, help="of text, for KL, perplexity and time")
    parser.add_argument("--positions", type=int, default=1024, help="of a window at which KL is measured")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--band", type=int, default=128, help="width of the bands that are added; 0 adds none")
    parser.add_argument("--plan", type=Path, nargs="*", default=[], help="tuned plans of this model")
    parser.add_argument("--methods", nargs="*", help="only these presets in this order, by the names in the table")
    parser.add_argument("--batch", type=int, default=1, help="windows in a timed reading, all the same")
    parser.add_argument("--repeats", type=int, default=3, help="of timed readings")
    parser.add_argument(
        "--no-times", dest="times", action="store_false", help="leave times to a later run, on an idle device"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no method after so long")
    parser.add_argument("--out", type=Path, default=Path("tasks.json"))
    parser.add_argument("--report", action="store_true", help="measure nothing: print tables")
    options = parser.parse_args(arguments)
    options.band = options.band or None
    for name, least in {"samples": 0, "windows": 1, "positions": 1, "repeats": 1, "batch": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}: {getattr(options, name)}")
    done: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.report:
        print(report(done))
        return
    until = time.monotonic() + 60 * options.minutes
    folder, device = options.model or smollm2(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.tokens:
        model = load(folder, device=device)
        for tokens in options.tokens:
            run(model, tokens, options, done, until)
    if options.yarn_tokens:
        model = with_yarn(folder, device)
        for tokens in options.yarn_tokens:
            run(model, tokens, options, done, until)


if __name__ == "__main__":
    main()

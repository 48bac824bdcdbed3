"""What a trained model loses and gains: `python -m benchmarks.trained --model FOLDER`.

Each method is a Python expression, such as "auto('fast')" or "xattention(0.9) | Band(128)", or a function of
yours, as "my_stages.mine(0.9)" or "my_stages:mine". Dense attention is first. For each length: KL from dense
attention on prose, manual, code and chat; the scores of 14 tasks in pairs with dense attention; density; time to
first token. Tasks in which dense attention scores under 60 %, over all seeds in the file, are left out. Settings
are chosen on the half "choose" of texts and seeds, and reported on the half "report". Results are written after
each method, and the same command goes on where it stopped. `make models` fetches models. Lengths past a model's
own are read with YaRN x 4.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import with_yarn
from benchmarks.trained.measure import BOUND, DENSE, Windows, losses, pipeline_of, scores, ttft_ms, versions
from benchmarks.trained.report import mean, table, write_results
from benchmarks.trained.tasks import samples as make_samples
from benchmarks.trained.tasks import tasks
from benchmarks.trained.texts import KINDS, text_of
from blocksparse.check.validators import UserError
from blocksparse.tools.demo.model import Model, load

CAN = 0.6  # what dense attention must score in a task
METHODS = ("auto('careful')", "auto()", "auto('fast')")


def run(model: Model, tokens: int, options: argparse.Namespace, rows: list[dict[str, Any]], until: float) -> None:
    """Every method at one length; adds to `rows` and writes them after each."""
    about = {"model": options.model.name, "tokens": tokens, "half": options.half, "seed": options.seed}

    def row_of(method: str) -> dict[str, Any]:
        row = next((r for r in rows if r["method"] == method and about.items() <= r.items()), None)
        if row is None:
            row = {**about, "method": method, "density": {}, "kl": {}, "scores": {}, "ttft_ms": None}
            row |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **versions()}
            rows.append(row)
        return row

    methods = [DENSE, *(m for m in options.methods if m != DENSE)]
    for part in options.parts:
        if part == "kl":
            counts = {"tokens": tokens, "count": options.windows, "positions": options.positions}
            windows = [Windows.of(model, kind, text_of(kind, options.half), **counts) for kind in options.kinds]
        elif part == "tasks":
            some = make_samples(
                model.tokenizer, options.half, tokens, options.samples, options.seed,
                lambda task: not options.tasks or task in options.tasks,
            )  # fmt: skip
        else:
            ids = model.tokenizer.encode(text_of("code", "report")[: 12 * tokens], add_special_tokens=False)
            prompt = torch.tensor([ids[:tokens]], device=model.device)
        for method in (*methods, *([BOUND] if part == "ttft" else [])):
            row = row_of(method)
            if time.monotonic() > until:
                print("the time is over; the same command goes on from here", flush=True)
                return
            if part == "kl" and not row["kl"]:
                row["kl"], row["density"] = losses(model, method, windows)
            elif part == "tasks":
                if method != DENSE:
                    some = {task: of_task for task, of_task in some.items() if can(task, rows, about)}
                if new := {task: of_task for task, of_task in some.items() if task not in row["scores"]}:
                    row["scores"] |= scores(model, method, new, at_once=options.at_once)
            elif part == "ttft" and row["ttft_ms"] is None:
                row["ttft_ms"] = ttft_ms(model, method, prompt, options.repeats)
            write(options.out, rows)
            print(line(row), flush=True)
        windows, some = [], {}
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def can(task: str, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> bool:
    """Whether dense attention scores `CAN` at this length over all seeds: one seed alone may be luck."""
    every = {key: value for key, value in about.items() if key != "seed"} | {"method": DENSE}
    of_task = [score for row in rows if every.items() <= row.items() for score in row["scores"].get(task, [])]
    return mean(of_task) >= CAN


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    unfinished = out.with_name(out.name + ".unfinished")
    unfinished.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    unfinished.replace(out)  # so that a run that is killed leaves whole results behind


def line(row: dict[str, Any]) -> str:
    """One line for a result."""
    parts = [f"{time.strftime('%H:%M:%S')} {row['model']} {row['tokens']:6} {row['method']:40}"]
    if row["kl"]:
        parts.append("KL " + " ".join(f"{kind} {mean(kl):.4f}" for kind, kl in row["kl"].items()))
        parts.append(f"density {mean(list(row['density'].values())):.3f}")
    if row["ttft_ms"] is not None:
        parts.append(f"TTFT {row['ttft_ms']:.1f} ms")
    if row["scores"]:
        flat = [score for some in row["scores"].values() for score in some]
        parts.append(f"tasks {100 * mean(flat):.1f} % of {len(flat)}:")
        parts.append(" ".join(f"{task} {100 * mean(some):.0f}" for task, some in row["scores"].items()))
    return " ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a transformers model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="see above")
    parser.add_argument("--half", choices=("choose", "report"), default="report")
    parser.add_argument("--parts", nargs="*", choices=("kl", "tasks", "ttft"), default=["kl", "tasks", "ttft"])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS), help="of text, for KL")
    parser.add_argument("--tasks", nargs="*", choices=list(tasks("report")), default=[], help="all unless given")
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    parser.add_argument("--windows", type=int, default=2, help="of each kind of text, for KL")
    parser.add_argument("--positions", type=int, default=1024, help="of a window at which KL is measured")
    parser.add_argument("--repeats", type=int, default=5, help="of timed prefills")
    parser.add_argument(
        "--at-once", type=int, default=262_144, help="tokens of prompts that are prefilled together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing after so long")
    parser.add_argument("--out", type=Path, default=Path("trained.json"))
    parser.add_argument("--report", action="store_true", help="measure nothing: print tables")
    parser.add_argument("--results", metavar="NAME", help="measure nothing: write the table NAME of docs/evidence")
    parser.add_argument("--about", nargs=2, metavar=("COMMAND", "INPUTS"), help="what stands below that table")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.results and options.about is None:
        parser.error("--results needs --about, the command and the inputs that the rows were measured with")
    if options.results:
        write_results(options.results, rows, *options.about)
    if options.report or options.results:
        print(table(rows))
        return
    for method in options.methods:
        if method != DENSE:
            try:
                pipeline_of(method)  # before the model is loaded, so that a mistake costs nothing
            except UserError as error:
                parser.error(str(error))
    until = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.model, device=device)
    for tokens in sorted(options.tokens):
        if tokens > model.longest:
            del model
            model = with_yarn(options.model, device)
            print(f"{tokens} tokens are read with YaRN", file=sys.stderr)
        run(model, tokens, options, rows, until)
    print(table(rows))


if __name__ == "__main__":
    main()

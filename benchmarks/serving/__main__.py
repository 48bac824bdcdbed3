"""vLLM on a GPU, unmodified and with the plugin in turn: `python -m benchmarks.serving --out serving.jsonl`.

All engines are started at once, each in a process of its own, and share the GPU: while one serves, the others
wait. First, `limit` keeps every block and must answer random mixes of requests as unmodified vLLM does. Then each
case is served by all engines in turn, round after round; then tasks are answered, and loads served. Nothing is
timed with a record. With `--also` the last engine takes on other configurations before its turns, so that a model
whose weights fill a GPU twice is enough to compare several.

Without `--model` the model has the shape of Llama-3.1-8B and random weights. With a folder, prompts are windows of
Python's library, and `--tasks` counts right answers. Each result is a line of JSON, written when it is there;
`--report FILE ...` prints tables of such files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.serving import report
from benchmarks.serving.compare import compare, soak
from benchmarks.serving.engine import longest
from benchmarks.serving.load import LENGTHS, Latency, poisson
from benchmarks.serving.turns import CHUNK, Another, Bound, Case, Engine, Turn
from benchmarks.trained.tasks import samples, tasks

LONG = "1x65536 1x16384 1x32768 1x131071 4x32768"  # the first one's first run is the first request after start
MIXES = "16x1000 16x4000 4x12000 16x1000x64 1x12000"
STOCK, TWIN, LIMIT = "stock", "stock again", "limit"
KEPT = {"preset": "sparge", "settings": {"theta": 1.0}, "dense_below": 0}  # everything; sizes do not say so
CAN = 0.6  # what unmodified vLLM must score in a task
ANSWER = 64  # tokens, more than any task asks for


@frozen(eq=False)
class Run:
    """The engines of a run, and where its results go."""

    options: argparse.Namespace
    began: float
    engines: dict[str, Engine]
    turns: dict[str, Turn]
    file: Any

    def left(self) -> float:
        """Seconds before which a round may begin."""
        return float(self.options.seconds - (time.perf_counter() - self.began))

    def write(self, kind: str, **what: Any) -> None:
        print(json.dumps({"kind": kind, **what}), file=self.file, flush=True)

    def cases(self) -> None:
        """Each case by all in turn, round after round."""
        print("\n| prompts | " + " | ".join(f"{name}, s" for name in self.turns) + " | speedup | first / later |")
        print("|---" * (len(self.turns) + 3) + "|", flush=True)
        for text in self.options.cases.split():
            case, repeats = Case.read(text), int(text.partition("*")[2] or self.options.repeats)
            times: dict[str, list[float]] = {name: [] for name in self.turns}
            longest = 0.0
            for seed in range(repeats + 1):  # the first one counts apart
                if self.left() < longest:
                    break
                start = time.perf_counter()
                for name, turn in self.turns.items():
                    times[name].append(turn.ask(do="serve", **case._asdict(), seed=f"{case} {seed}"))
                longest = time.perf_counter() - start
            if all(times.values()):
                self.write("case", case=str(case), **case._asdict(), seconds=times)
                print(report.row(str(case), times), flush=True)
            else:
                print(f"| {case} | no time is left |", flush=True)

    def tasks(self, prepared: Mapping[int, Mapping[str, Path]]) -> None:
        """Each task by all in turn; by the others only where unmodified vLLM scores `CAN`."""
        turns = {name: turn for name, turn in self.turns.items() if not isinstance(turn, Bound)}
        for tokens, paths in prepared.items():
            for task, path in paths.items():
                scores: dict[str, list[float]] = {}
                for name, turn in turns.items():
                    if self.left() < 0:
                        return
                    if scores and sum(scores[STOCK]) < CAN * len(scores[STOCK]):
                        break
                    scores[name] = turn.ask(do="answer", file=str(path))
                    self.write("task", tokens=tokens, task=task, engine=name, scores=scores[name])
                said = ", ".join(f"{name} {100 * sum(some) / len(some):.0f} %" for name, some in scores.items())
                print(f"{tokens} tokens, {task}: {said}; {self.left():.0f} s are left", flush=True)

    def loads(self) -> None:
        """Each load by each process; configurations that one takes on have no load of their own."""
        for text in self.options.load.split():
            rate, _, seconds = text.partition("x")
            lengths = (
                [(share, min(a, 300), min(b, 300)) for share, a, b in LENGTHS] if self.options.tiny else LENGTHS
            )
            arrivals = poisson(float(rate), float(seconds), lengths=lengths)
            for name, engine in self.engines.items():
                if self.left() < float(seconds):
                    print(f"load of {text}: no time is left for {name}", flush=True)
                    continue
                times = engine.ask(do="load", arrivals=arrivals, seed=text)
                latency = Latency.of(arrivals, times)
                before = {"rate": float(rate), "seconds": float(seconds), "engine": name}
                self.write("load", **before, **asdict(latency))
                print(report.load_line(before | asdict(latency)), flush=True)

    def rest(self) -> None:
        """Densities, counters, kernels and memory, of what was asked for."""
        others = list(self.turns.items())[1:]
        for name, turn in others if self.options.densities else ():
            if isinstance(turn, Bound):
                continue
            for case in map(Case.read, self.options.densities.split()):
                density = turn.ask(do="density", **case._asdict(), seed=f"{case} density")
                self.write("density", engine=name, case=str(case), density=density)
                print("density", name, case, density, flush=True)
        for name, engine in list(self.engines.items())[1:]:
            self.write("counters", engine=name, counters=(found := engine.ask(do="counters")))
            print(name, found, flush=True)
        for case in map(Case.read, self.options.profile.split()):
            for name, turn in self.turns.items():
                found = turn.ask(do="profile", **case._asdict(), seed=f"{case}")
                self.write("profile", engine=name, case=str(case), **found)
                print(f"\n{name}, {case}: {found['seconds']:.3f} s, the GPU {found['gpu_ms']:.0f} ms")
                for what, (ms, count) in (*found["kernels"], *found["calls"]):
                    if ms > found["gpu_ms"] / 1000:
                        print(f"  {ms:9.2f} ms {count:6d} x {what}", flush=True)
        for name, turn in others if self.options.soak else ():
            for seconds, memory in soak(turn, self.options.soak, tiny=self.options.tiny):
                self.write("memory", engine=name, seconds=seconds, gib=memory)


def main() -> int:
    options, began = _options(), time.perf_counter()
    if options.report:
        print(report.tables([json.loads(line) for path in options.report for line in path.open()]))
        return 0
    configurations: dict[str, Any] = (
        {STOCK: None} | ({TWIN: None} if options.twin else {}) | _named(options.engine)
    )
    if options.mixes:
        configurations[LIMIT] = KEPT | ({"min_tokens": 32, "min_queries": 16} if options.tiny else {})
    common = {
        name: getattr(options, name)
        for name in ("layers", "shard", "ranks", "length", "tokens", "tiny", "compiled", "exactly", "yarn", "vllm")
    } | {
        "model": options.model and str(options.model),
        "chunk": max([CHUNK, *(Case.read(text).chunk for text in options.cases.split())]),
    }  # fmt: skip
    engines = {
        name: Engine(name, common | {"blocksparse": each}, options.out.with_suffix(f".{name}.log"))
        for name, each in configurations.items()
    }
    prepared = {tokens: _prepared(options, tokens) for tokens in options.tasks}  # while the engines start
    ready = {name: engine.answer() for name, engine in engines.items()}
    with options.out.open("w", encoding="utf-8") as file:
        limit = engines.pop(LIMIT, None)
        run = Run(options, began, engines, _turns(options, engines), file)
        given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        run.write("options", **given, date=time.strftime("%Y-%m-%d"))
        for name, about in ready.items():
            run.write("engine", engine=name, blocksparse=configurations[name], **about)
            said = [] if name == LIMIT else engines[name].said()[-3:]
            print(f"{name} is ready after {about['ready_s']} s", *said, sep="\n  ", flush=True)
        print(ready[STOCK]["versions"], f"{run.left():.0f} s are left", flush=True)
        if limit is not None:
            found = compare(engines[STOCK], limit, options.mixes, tiny=options.tiny)
            run.write("limit", **found)
            print(f"dense limit: {found}; {run.left():.0f} s are left", flush=True)
            limit.close()
            if not found["same"]:
                print("NOTHING BELOW COUNTS: with every block kept, answers differ", flush=True)
        steps: dict[str, Callable[[], None]] = {
            "cases": run.cases, "tasks": lambda: run.tasks(prepared), "load": run.loads
        }  # fmt: skip
        for step in options.order:
            steps[step]()
        run.rest()
    for engine in engines.values():
        engine.close()
    return 0


def _turns(options: argparse.Namespace, engines: Mapping[str, Engine]) -> dict[str, Turn]:
    turns: dict[str, Turn] = dict(engines)
    last = list(engines.values())[-1]
    if options.also:
        its = {last.name: last.job["blocksparse"]} | _named(options.also)
        turns |= {name: Another(name, last, configuration) for name, configuration in its.items()}
    if options.bound:
        turns[Bound.name] = Bound(engines[STOCK])
    return turns


def _prepared(options: argparse.Namespace, tokens: int) -> dict[str, Path]:
    """A file with the prompts of each task. They take a minute to make, and are the same for all engines."""
    name = "-".join(["tasks", options.model.name, str(tokens), str(options.samples), *sorted(options.kinds)])
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        unfinished = Path(tempfile.mkdtemp())
        wanted = set(options.kinds or tasks("report"))
        found = samples(tokenizer, "report", tokens, options.samples, 0, wanted.__contains__)
        for task, some in found.items():
            (unfinished / f"{task}.json").write_text(json.dumps([asdict(sample) for sample in some]))
        unfinished.rename(folder)
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _named(given: Sequence[str]) -> dict[str, Any]:
    """Configurations by name, of arguments such as `auto={"quality": "balanced"}`."""
    return {name: json.loads(text) for name, text in (each.split("=", 1) for each in given)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("serving.jsonl"),
        help="every result, as lines of JSON; logs lie beside it",
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="measure nothing: print tables")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=JSON",
        help='an engine with the plugin and its configuration: auto={"quality": "balanced"}; several may be given',
    )  # fmt: skip
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=JSON",
        help="a configuration that the last engine takes on in turn with its own: its preset alone",
    )  # fmt: skip
    parser.add_argument(
        "--bound", action="store_true", help="unmodified vLLM without any attention takes turns too"
    )
    parser.add_argument(
        "--twin", action="store_true", help="unmodified vLLM in one more process: what two processes differ by"
    )
    parser.add_argument("--model", type=Path, help="a folder with trained weights and a tokenizer")
    parser.add_argument("--yarn", type=float, default=0, help="read so many times the model's context, by YaRN")
    parser.add_argument(
        "--cases", help="prompts x tokens [x answer] [@chunk] [*repeats]; several sizes of --length unless given"
    )
    parser.add_argument(
        "--tasks", type=int, nargs="*", default=[], help="lengths of prompts whose answers are scored"
    )
    parser.add_argument(
        "--kinds", nargs="*", default=[], choices=list(tasks("report")), help="of tasks; all unless given"
    )
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    parser.add_argument(
        "--load", default="", help='"4x30 8x60": requests per second x seconds, of mixed lengths, at random times'
    )
    parser.add_argument(
        "--order", nargs="*", choices=("cases", "tasks", "load"), default=("cases", "tasks", "load")
    )
    parser.add_argument("--mixes", type=int, default=50, help="random mixes that are compared first; 0 for none")
    parser.add_argument("--layers", type=int, default=16, help="of the model; 32 are Llama-3.1-8B's")
    parser.add_argument("--shard", type=int, default=1, help="of the heads one part of so many, as on one GPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs with some of the heads each (tensor parallel)")
    parser.add_argument("--length", type=int, default=131072, help="of the longest prompt, with its answer")
    parser.add_argument("--tokens", type=int, default=140000, help="that the cache of an engine holds")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--seconds", type=float, default=1200, help="after which no round is begun")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile and CUDA graphs, not eager")
    parser.add_argument(
        "--exactly", action="store_true", help="in float16 and logits in float32, to compare answers"
    )
    parser.add_argument(
        "--vllm", type=json.loads, default={}, metavar="JSON", help='of every engine: {"kv_cache_dtype": "fp8"}'
    )
    parser.add_argument("--densities", default="", help="cases of which the kept share of blocks is said")
    parser.add_argument(
        "--profile", default="", help="cases whose kernels and calls of CUDA are listed at the end"
    )
    parser.add_argument("--soak", type=float, default=0, help="seconds of random mixes at the end, for memory")
    parser.add_argument("--tiny", action="store_true", help="a tiny model or a CPU, to try the script")
    options = parser.parse_args()
    if options.report:
        return options
    if options.also and not options.engine:
        parser.error("--also needs an --engine: unmodified vLLM takes on no configuration")
    if options.model is None and (options.tasks or options.yarn):
        parser.error("--tasks and --yarn need a --model: random weights answer nothing")
    names = [STOCK, TWIN, *(each.split("=", 1)[0] for each in (*options.engine, *options.also))]
    if len(set(names)) < len(names):
        parser.error(f"names must differ, also from '{STOCK}' and '{TWIN}': {', '.join(names[2:])}")
    most = options.length if options.model is None else longest(options.model, vars(options))
    if options.cases is None:
        options.cases = " ".join(text for text in f"{LONG} {MIXES}".split() if Case.read(text).length <= most)
    for text in " ".join([options.cases, options.densities, options.profile]).split():
        if Case.read(text).length > most:
            parser.error(
                f"{text!r} has {Case.read(text).length} tokens with its answer, more than {most}, see --length"
            )
    if options.tasks and max(options.tasks) + ANSWER > most:
        parser.error(f"--tasks must be at most {most - ANSWER}: {max(options.tasks)}. See --length")
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here (docs/start/vllm.md says how)")
    return options


if __name__ == "__main__":
    sys.exit(main())

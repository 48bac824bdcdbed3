"""vLLM on a GPU, stock and with the plugin in turn: `python -m benchmarks.serving --out serving.json`.

All engines are started at once, each in a process of its own, and share the GPU: while one serves, the others
wait. First, `limit` keeps every block and must answer random mixes of requests as stock vLLM does. Then each case
is served by all the others in turn, round after round, and a row of a table is printed. Nothing is timed with a
record. With `--also` the last engine takes on other configurations before its turns, so that a model whose weights
fill a GPU twice is enough to compare several.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Case(NamedTuple):
    """Prompts that arrive at once."""

    prompts: int
    tokens: int
    answer: int = 1
    chunk: int = 8192

    def __str__(self) -> str:
        answer = f", {self.answer} tokens of answer" if self.answer > 1 else ""
        return f"{self.prompts} x {self.tokens:,}{answer}, chunks of {self.chunk}"

    @classmethod
    def read(cls, text: str) -> Case:
        """Of `16x1000`, `16x1000x64` (64 tokens of answer) or `1x65536@2048` (in chunks)."""
        sizes, _, chunk = text.partition("@")
        case = cls(*map(int, sizes.split("x")))
        return case._replace(chunk=int(chunk)) if chunk else case


LONG = "1x65536 1x16384 1x32768 1x131071 4x32768"  # the first one's first run is the first request after start
MIXES = "16x1000 16x4000 4x12000 16x1000x64 1x12000"
LEAST = 0.98  # of stock's speed, with short prompts
LOGPROBS = 2e-3
STOCK, LIMIT = "stock", "limit"
KEPT = {"preset": "sparge", "settings": {"theta": 1.0}, "dense_below": 0}  # everything; sizes do not say so


class Engine:
    """A process of `benchmarks.serving_engine`. What it is told is begun at once; `answer` waits for it."""

    def __init__(self, name: str, job: dict[str, Any], log: Path) -> None:
        self.name, self.job, self.log = name, job, log
        command = [sys.executable, "-m", "benchmarks.serving_engine"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self.tell(**job)

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the engine {self.name} failed:\n{self.log.read_text()[-5000:]}")
        return json.loads(line)

    def ask(self, **what: Any) -> Any:
        self.tell(**what)
        return self.answer()

    def said(self) -> list[str]:
        """What this library said in the log."""
        return [line.strip()[:300] for line in self.log.read_text().splitlines() if "blocksparse: " in line]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Another:
    """A configuration that an engine takes on before it does anything for it."""

    def __init__(self, name: str, engine: Engine, configuration: dict[str, Any]) -> None:
        self.name, self.engine, self.configuration = name, engine, configuration

    def ask(self, **what: Any) -> Any:
        self.engine.ask(do="become", blocksparse=self.configuration)
        return self.engine.ask(**what)


def main() -> int:
    options, began = _options(), time.perf_counter()
    configurations: dict[str, Any] = {STOCK: None} | _named(options.engine)
    if options.mixes:
        configurations[LIMIT] = KEPT | ({"min_tokens": 32, "min_queries": 16} if options.tiny else {})
    common = {
        name: getattr(options, name)
        for name in ("layers", "shard", "ranks", "length", "tokens", "tiny", "compiled", "exactly", "vllm")
    }
    engines = {
        name: Engine(name, common | {"blocksparse": each}, options.out.with_suffix(f".{name}.log"))
        for name, each in configurations.items()
    }
    result: dict[str, Any] = {"options": vars(options) | {"out": options.out.name}, "cases": {}}
    result["engines"] = {name: engine.job | engine.answer() for name, engine in engines.items()}

    def left() -> float:
        return float(options.seconds - (time.perf_counter() - began))

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name, engine in engines.items():
        ready = f"{name} is ready after {result['engines'][name]['ready_s']} s"
        print(ready, *engine.said()[-3:], sep="\n  ", flush=True)
    print(result["engines"][STOCK]["versions"], f"{left():.0f} s are left", flush=True)
    limit = engines.pop(LIMIT, None)
    if limit is not None:
        result["limit"] = compare(engines[STOCK], limit, options.mixes, tiny=options.tiny)
        save()
        print(f"dense limit: {result['limit']}; {left():.0f} s are left", flush=True)
        limit.close()
        if not result["limit"]["same"]:
            print("NOTHING BELOW COUNTS: with every block kept, answers differ", flush=True)
    processes = list(engines.values())
    turns: dict[str, Engine | Another] = dict(engines)
    if options.also:
        its = {processes[-1].name: processes[-1].job["blocksparse"]} | _named(options.also)
        turns |= {name: Another(name, processes[-1], configuration) for name, configuration in its.items()}
    print("\n| prompts | " + " | ".join(f"{name}, s" for name in turns) + " | speedup | first / later |")
    print("|---" * (len(turns) + 3) + "|", flush=True)
    for text in options.cases.split():
        written, _, repeats = text.partition("*")
        case = Case.read(written)
        times: dict[str, list[float]] = {name: [] for name in turns}
        result["cases"][str(case)] = times
        longest = 0.0
        for seed in range(int(repeats or options.repeats) + 1):  # the first one counts apart
            if left() < longest:
                break
            start = time.perf_counter()
            for name, turn in turns.items():
                times[name].append(turn.ask(do="serve", **case._asdict(), seed=f"{case} {seed}"))
            longest = time.perf_counter() - start
        save()
        print(row(case, times) if all(times.values()) else f"| {case} | no time is left |", flush=True)
    if options.densities:
        for name, turn in list(turns.items())[1:]:
            for case in map(Case.read, options.densities.split()):
                density = turn.ask(do="density", **case._asdict(), seed=f"{case} density")
                result.setdefault("densities", {}).setdefault(name, {})[str(case)] = density
                print("density", name, case, density, flush=True)
                save()
            result.setdefault("counters", {})[name] = turn.ask(do="counters")
            print(name, result["counters"][name], flush=True)
    for case in map(Case.read, options.profile.split()):
        for name, turn in turns.items():
            found = turn.ask(do="profile", **case._asdict(), seed=f"{case}")
            result.setdefault("profiles", {}).setdefault(name, {})[str(case)] = found
            save()
            print(f"\n{name}, {case}: {found['seconds']:.3f} s, the GPU {found['gpu_ms']:.0f} ms")
            for kernel, (ms, launches) in found["kernels"]:
                if ms > found["gpu_ms"] / 1000:
                    print(f"  {ms:9.2f} ms {launches:6d} x {kernel}", flush=True)
    if options.soak:
        for name, turn in list(turns.items())[1:]:
            for found in soak(turn, options):
                result.setdefault("soak", {}).setdefault(name, []).append(found)
                save()
    save()
    for process in processes:
        process.close()
    return 0


def _named(given: Sequence[str]) -> dict[str, Any]:
    """Configurations by name, of arguments such as `auto={"quality": "balanced"}`."""
    return {name: json.loads(text) for name, text in (each.split("=", 1) for each in given)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("serving.json"), help="every time, as JSON; logs lie beside it"
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=JSON",
        help='an engine with the plugin and its configuration: auto={"quality": "balanced"}; several may be given',
    )  # fmt: skip
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=JSON",
        help="a configuration that the last engine takes on in turn with its own: its preset and `gather` alone",
    )  # fmt: skip
    parser.add_argument(
        "--cases", default=f"{LONG} {MIXES}", help="prompts x tokens [x answer] [@chunk] [*repeats]"
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
    parser.add_argument("--profile", default="", help="cases whose kernels are listed at the end")
    parser.add_argument("--soak", type=float, default=0, help="seconds of random mixes at the end, for memory")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    options = parser.parse_args()
    if options.also and not options.engine:
        parser.error("--also needs an --engine: stock vLLM takes on no configuration")
    names = [STOCK, *(each.split("=", 1)[0] for each in (*options.engine, *options.also))]
    if len(set(names)) < len(names):
        parser.error(f"names must differ, also from '{STOCK}': {', '.join(names[1:])}")
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here (docs/start/vllm.md says how)")
    return options


def mixes(count: int, *, tiny: bool) -> list[dict[str, Any]]:
    """Random requests that arrive in turn and share beginnings; every tenth is a crowd, which fills the cache."""
    found, most = [], 300 if tiny else 14000
    for seed in range(count):
        draw = random.Random(seed)
        crowd = seed % 10 == 9 and not tiny
        lengths = [draw.randint(4400, 4460) for _ in range(31)]
        if not crowd:
            # Many are short, some are long.
            lengths = [int(most ** draw.uniform(0.4, 1.0)) for _ in range(draw.randint(2, 6))]
        found.append(
            {
                "lengths": lengths,
                "arrivals": [0 if crowd else draw.randint(0, 6) for _ in lengths],
                "shared": 0 if crowd else draw.choice((0, most // 20, most // 4)),
                "answer": 120 if crowd else draw.randint(1, 8),
                "chunk": 8192 if crowd else draw.choice((most // 40, most // 7, 8192)),
                "seed": seed,
            }
        )
    return found


def compare(stock: Engine, other: Engine, count: int, *, tiny: bool) -> dict[str, Any]:
    """Whether two engines answer alike, and as near as stock to itself where it cuts prompts into other chunks."""
    itself, its = Differences(), Differences()
    cached = preempted = 0
    for mix in mixes(count, tiny=tiny):
        for engine in (stock, other):
            engine.tell(do="mix", **mix)
        expected, found = stock.answer(), other.answer()
        its.saw(expected["answers"], found["answers"])
        cached, preempted = cached + found["cached"], preempted + found["preempted"]
        halved = stock.ask(do="mix", **(mix | {"chunk": max(mix["chunk"] * 5 // 8, 64)}))
        itself.saw(expected["answers"], halved["answers"])
    same = not its.other and its.worst <= max(1.5 * itself.worst, LOGPROBS)
    counters = {"mixes": count, "cached": cached, "preempted": preempted, "counters": other.ask(do="counters")}
    return {"same": same, "differences": vars(its), "stock from itself": vars(itself)} | counters


class Differences:
    """How alike two engines answered. What follows on different tokens answers another text: not compared."""

    def __init__(self) -> None:
        self.tokens = self.above = 0  # compared; with a logprob that differs by more than 2e-3
        self.ties = self.other = 0  # different tokens: one as likely as the other, or not
        self.worst = self.mean = 0.0  # difference of a logprob among the five best

    def saw(self, every_expected: list[Any], every_found: list[Any]) -> None:
        for expected, found in zip(every_expected, every_found, strict=True):
            for (token, best), (token_too, best_too) in zip(expected, found, strict=True):
                apart = [abs(x - best_too[key]) for key, x in best.items() if key in best_too]
                self.mean = (self.mean * self.tokens + max(apart)) / (self.tokens + 1)
                self.tokens += 1
                self.worst, self.above = max(self.worst, *apart), self.above + (max(apart) > LOGPROBS)
                if token != token_too:
                    tie = best[str(token)] - best.get(str(token_too), -99.0) <= 2 * max(apart)
                    self.ties, self.other = self.ties + tie, self.other + (not tie)
                    break


def soak(engine: Engine | Another, options: argparse.Namespace) -> Iterator[tuple[float, list[float]]]:
    """Serve random mixes for some time: (seconds, `memory` of the engine) after each ten of them."""
    began, every = time.perf_counter(), mixes(10, tiny=options.tiny)
    while time.perf_counter() - began < options.soak:
        for mix in every:
            mix["seed"] += len(every)  # other prompts of the same lengths
            engine.ask(do="mix", **mix)
        seconds, (there, taken, here) = round(time.perf_counter() - began, 1), engine.ask(do="memory")
        gpu = f"{there:.3f} GiB of the GPU in use, {taken:.3f} taken"
        print(f"{engine.name}: {gpu}, {here:.3f} of the host, after {seconds} s", flush=True)
        yield seconds, [there, taken, here]


def row(case: Case, times: Mapping[str, Sequence[float]]) -> str:
    """Medians of all but the first round, as a row of a table. The first engine is the one of the comparison."""
    before, *others = (median(seconds[1:] or seconds) for seconds in times.values())
    ratios = " / ".join(f"{before / after:.2f}{' (below .98)' * (before / after < LEAST)}" for after in others)
    first = " / ".join(f"{x[0] / median(x[1:] or x):.2f}" for x in times.values())
    return f"| {case} | " + " | ".join(f"{x:.3f}" for x in (before, *others)) + f" | {ratios} | {first} |"


if __name__ == "__main__":
    sys.exit(main())

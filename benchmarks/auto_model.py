"""KL, tasks and times of causal presets in a model: `python -m benchmarks.auto_model WHAT [TOKENS ...]`.

Lengths over the model's own are read by YaRN. `quality` measures density, KL, and, with --samples, tasks in which
dense attention scores over 60 %; `times` measures attention in all layers, in calls of --at-once tokens. It needs
an idle device; `quality` does not. The file grows row by row, and no method begins after --seconds. `auto` and
those that it is compared with come first. `table` measures nothing: it prints what the files of --from hold
together, of what was measured twice the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

import blocksparse as bs
from benchmarks.pipelines import budget
from benchmarks.quality import smollm2, with_yarn
from benchmarks.run import environment
from benchmarks.tasks.__main__ import CAN, WINDOWS_FROM, samples_of, windows
from benchmarks.tasks.measure import Texts, attached, attention_ms, replies
from benchmarks.tasks.methods import ALWAYS_SPARSE, DENSE, Method
from benchmarks.tasks.paired import difference
from benchmarks.tasks.sample import Haystack, Sample
from blocksparse.hosts.transformers import DensityRecorder
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import Model, load

Row = dict[str, Any]
Samples = Mapping[str, Sequence[Sample]]
LENGTHS = (4096, 7680, 16384, 32768)
BAND = 128
NOT_RECORDED = ("skip_softmax",)  # a record of what it leaves out would take many times as long as its calls


def methods() -> Iterator[Method]:
    """Dense attention first; presets for text at some settings, those with a band on top that gain by one."""

    def method(preset: str, setting: object, pipeline: Any) -> Method:
        if isinstance(getattr(pipeline, "executor", None), bs.AutoExecutor):
            pipeline = evolve(pipeline, executor=ALWAYS_SPARSE)
        return Method(preset, f"{setting:g}" if isinstance(setting, float) else str(setting), pipeline)

    def banded(preset: str, setting: object, pipeline: Any) -> Method:
        pipeline = evolve(pipeline, selector=pipeline.selector | bs.Band(BAND))
        return method(f"{preset} | Band({BAND})", setting, pipeline)

    yield Method(DENSE, "", None)
    qualities: tuple[bs.Quality, ...] = ("balanced", "careful", "fast")
    yield from (method("auto", quality, bs.auto(quality)) for quality in qualities)
    for part in (0.1, 0.05):  # what the page on vLLM times, and so a fixed number of keys
        yield method("sparge", f"share={part}", bs.sparge(share=part))
    for keys in (4096, 2048):
        yield method("budget", f"{keys} keys", budget(keys))
    for mass in (0.97, 0.9, 0.95, 0.99):
        yield banded("mean_pooling(block=128)", mass, bs.mean_pooling(mass, block=128))
    for budgets in ((60, 120), (200, 500)):
        yield method("minference", f"{budgets[0]}, {budgets[1]}", bs.minference(*budgets))
    yield method("flex_prefill", 0.95, bs.flex_prefill())
    few = bs.flex_prefill(0.9, block=64, min_budget=128)
    yield banded("flex_prefill(block=64)", "0.9, min_budget=128", few)
    for factor in (100.0, 1000.0, 5000.0):
        yield method("skip_softmax", factor, bs.skip_softmax(factor))
    for layers in (10, 16):
        schedule = bs.triangle_mix(layers, 128, 1024, executor=ALWAYS_SPARSE)
        yield method("triangle_mix", f"{layers}, 128, 1024", schedule)
    for alpha in (0.12, 0.06, 0.03):
        yield method("flash_prefill", alpha, bs.flash_prefill(alpha))
    for mass in (0.95, 0.9, 0.85):
        yield method("prism", mass, bs.prism(mass))
    for k, decay in ((None, 0.7), (32, 0.7), (16, 0.7)):
        yield method("stem", f"k={k}, decay={decay:g}", bs.stem(decay, k=k))
    yield method("stem(weight=0)", "k=16, decay=0.7", bs.stem(k=16, weight=0.0))
    for mass in (0.9, 0.95, 0.8):
        yield banded("xattention(stride=8, block=64)", mass, bs.xattention(mass, stride=8, block=64))
    for tau, theta in ((0.95, 0.5), (0.9, 0.3)):
        yield banded("sparge", f"{tau:g}, {theta:g}", bs.sparge(tau, theta))
    for mass in (0.9, 0.75):
        yield banded("pbs_attn", mass, bs.pbs_attn(mass))
    yield method("tri_shape", "128, 1024", bs.tri_shape(128, 1024))
    yield method("a_shape", "128, 1024", bs.a_shape(128, 1024))
    yield method("s2o(S=1024, block=128, band=128)", 0.01, bs.s2o(0.01, S=1024, block=128, band=128))
    for mass in (0.9, 0.97, 0.95, 0.99):
        yield banded("mean_pooling(block=64)", mass, bs.mean_pooling(mass, block=64))
    for stride, block, masses in ((8, 128, (0.9, 0.95)), (16, 64, (0.9, 0.95)), (16, 128, (0.97, 0.85))):
        name = f'xattention(stride={stride}, pattern="sum", block={block})'
        for mass in masses:
            yield banded(name, mass, bs.xattention(mass, stride=stride, pattern="sum", block=block))
    # What kernels alone change; Everything() would be left out for dense attention.
    yield method("everything", "", bs.Pipeline(bs.Identity(), bs.NoScorer(128), bs.Threshold(-1.0), ALWAYS_SPARSE))


def quality(model: Model, method: Method, samples: Samples, texts: Texts) -> Row:
    """Density, KL and scores, as of `benchmarks.tasks`."""
    losses, recorder = [], None if method.preset in NOT_RECORDED else DensityRecorder()
    for reading in texts.readings:
        with torch.inference_mode(), attached(model, method, recorder):
            losses.append(reading.losses().text)
    flat = [sample for some in samples.values() for sample in some]
    scores = (s.score(reply) for s, reply in zip(flat, replies(model, method, flat) if flat else (), strict=True))
    return {
        "scores": {task: [next(scores) for _ in some] for task, some in samples.items()},
        "kl": statistics.fmean(losses),
        "density": None if recorder is None else recorder.mean_density(),
    }


class Bench:
    """What methods read at one length."""

    def __init__(self, model: Model, tokens: int, options: argparse.Namespace) -> None:
        self.model, self.tokens, self.options = model, tokens, options
        content = [path.read_text(encoding="utf-8") for path in options.texts]
        self.samples: Samples = {}
        if options.what == "quality" and options.samples:
            haystack = Haystack(model.tokenizer, content[0][: int(len(content[0]) * WINDOWS_FROM)])
            self.samples = samples_of(haystack, tokens, options.samples, options.seed)
        of_texts, count = (content, options.windows) if options.what == "quality" else (content[:1], 1)
        ids = [window for text in of_texts for window in windows(model, text, tokens, count)]
        self.texts = Texts.of(model, ids, min(options.positions, tokens // 2))

    def row(self, method: Method) -> Row:
        """One method; after dense attention only tasks that it can do are left."""
        began = time.monotonic()
        row: Row = {"preset": method.preset, "setting": method.setting, "tokens": self.tokens}
        try:
            if self.options.what == "quality":
                row |= quality(self.model, method, self.samples, self.texts)
                if method.attention is None:
                    able = {task for task, scores in row["scores"].items() if statistics.fmean(scores) > CAN}
                    self.samples = {task: some for task, some in self.samples.items() if task in able}
            else:
                row["batch"] = max(1, self.options.at_once // self.tokens)
                row["attention_ms"] = attention_ms(
                    self.model, method, self.texts, batch=row["batch"], repeats=self.options.repeats
                )
        except Exception as error:  # the others are still worth having
            row["why"] = repr(error)[:300]
        return row | {"seconds": time.monotonic() - began}


def line(row: Row) -> str:
    """One line for a row."""
    figures = [
        f"{name} {row[name]:.4f}" for name in ("density", "kl", "attention_ms") if row.get(name) is not None
    ]
    figures += [f"{task} {statistics.fmean(scores):.2f}" for task, scores in row.get("scores", {}).items()]
    return f"{row['tokens']:6} {row['preset']} {row['setting']}: {', '.join(figures)} {row.get('why', '')}"


def together(files: Sequence[Path]) -> list[Row]:
    """A row for each method and length, with what any of the files says of it, the last one first."""
    found: dict[tuple[str, str, int], Row] = {}
    for path in files:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            key = row["preset"], row["setting"], row["tokens"]
            found[key] = found.get(key, {}) | {name: x for name, x in row.items() if name != "seconds"}
    return list(found.values())


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Heads, then a line for each method and setting: density, KL, score and milliseconds at each length.

    The score is the mean over the tasks that dense attention does, in percent, with the interval of its difference
    from dense attention's in points where there are samples enough for one.
    """
    cells = {(row["preset"], row["setting"], row["tokens"]): row for row in rows}
    lengths = sorted({row["tokens"] for row in rows})
    lines = [["method", "setting", *(f"{x}, {N}" for N in lengths for x in ("density", "KL", "score", "ms"))]]
    for preset, setting in dict.fromkeys(
        (row["preset"], row["setting"]) for row in rows if row["preset"] != DENSE
    ):
        line = [f"`{preset}`", setting or "-"]
        for N in lengths:
            row, dense = cells.get((preset, setting, N), {}), cells.get((DENSE, "", N), {})
            small = [f"{x:.{digits}f}" if (x := row.get(name)) is not None else "-" for name, digits in _DIGITS]
            density, kl, ms = small
            line += [density, kl, _score(row.get("scores"), dense.get("scores")), ms]
        lines.append(line)
    return lines


_DIGITS = (("density", 3), ("kl", 4), ("attention_ms", 1))
_ENOUGH = 24  # samples


def _score(scores: Mapping[str, Sequence[float]] | None, dense: Mapping[str, Sequence[float]] | None) -> str:
    if not scores or not dense:
        return "-"
    ours, its = ([x for task in scores for x in some[task]] for some in (scores, dense))
    if len(ours) < _ENOUGH:
        return f"{100 * statistics.fmean(ours):.0f}"
    beside = difference(ours, its)
    return f"{100 * statistics.fmean(ours):.0f} ({100 * beside.low:+.0f} to {100 * beside.high:+.0f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "times", "table"))
    parser.add_argument("tokens", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--model", type=Path, help="a folder with a transformers model; SmolLM2 if not given")
    parser.add_argument("--texts", type=Path, nargs="+", default=[TEXT], help="tasks and times take the first")
    parser.add_argument("--windows", type=int, default=3, help="of each text, for KL")
    parser.add_argument("--positions", type=int, default=1024, help="of a window at which KL is measured")
    parser.add_argument("--samples", type=int, default=16, help="of each task; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=65536, help="tokens in a timed call")
    parser.add_argument("--repeats", type=int, default=3, help="of timed calls")
    parser.add_argument("--only", nargs="*", help="only these presets, and dense attention")
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--from", dest="files", type=Path, nargs="+", default=[], help="files that were written")
    parser.add_argument("--json", type=Path, default=Path("auto-model.json"))
    options = parser.parse_intermixed_args(arguments)  # lengths may stand behind options
    if options.what == "table":
        for cells in table(together(options.files)):
            print(f"| {' | '.join(cells)} |")
        return
    until = time.monotonic() + options.seconds
    every = list(methods())
    if options.only is not None:
        if unknown := set(options.only) - {method.preset for method in every}:
            parser.error(
                f"no such presets: {', '.join(sorted(unknown))}; there are {sorted({m.preset for m in every})}"
            )
        every = [method for method in every if method.preset in (DENSE, *options.only)]
    folder, device = options.model or smollm2(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "environment": environment(device), "texts": [path.name for path in options.texts],
        **{name: getattr(options, name) for name in ("windows", "positions", "samples", "seed")}, "rows": [],
    }  # fmt: skip
    print(found["environment"], flush=True)
    models = {False: load(folder, device=device)}
    trained = models[False].network.config.max_position_embeddings
    if max(options.tokens) > trained:
        models[True] = with_yarn(folder, device)
    benches = [Bench(models[tokens > trained], tokens, options) for tokens in options.tokens]
    for method in every:
        for bench in benches:
            if time.monotonic() > until:
                print(f"the time is over at {method.name}", flush=True)
                return
            found["rows"].append(bench.row(method))
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(line(found["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()

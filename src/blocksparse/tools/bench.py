"""`blocksparse bench`: dense attention and presets are timed at several lengths, in the user's shapes."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn.functional import normalize

from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.spec import AttentionSpec

QKV = tuple[Tensor, Tensor, Tensor]


def structured(
    N: int,
    Hq: int,
    Hkv: int,
    D: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    topics: int = 8,
    stretch: int = 384,
    opening: int = 512,
) -> QKV:
    """`q` `[1, Hq, N, D]`, `k`, `v` `[1, Hkv, N, D]` with structure as real heads have it, at any length.

    Stretches of about `stretch` tokens have one of a few topics, which come back. A query is drawn to its topic,
    weakly in the first query head and sharply in the last. Every query is drawn to the first tokens, to the
    opening (a system prompt), and to one key in 256. Drawn one head after another from the device's generator.

    As logits: 6 to 8 for the own topic, 7 for the opening, 8 for a heavy key, 10 for the sink, a few tenths of
    noise. `pbs_attn(0.9)` keeps about a tenth of the blocks at 32K and 128K tokens.
    """
    q, k, v = (torch.empty(1, H, N, D, device=device, dtype=dtype) for H in (Hq, Hkv, Hkv))
    group, key_size, common_size = Hq // Hkv, 6**0.5, 2.0

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    for h in range(Hkv):
        turn = (torch.rand(N, device=device) < 1 / stretch).cumsum(0)
        topic_of = torch.randint(topics, (N,), device=device)[turn]
        directions = normalize(randn(topics + 1, D), dim=-1) * D**0.25  # products are logits
        topic, common = directions[topic_of], directions[-1]
        drawn = torch.zeros(N, 1, device=device)
        drawn[torch.randint(N, (max(1, N // 256),), device=device)] = 8.0
        drawn[:opening] = 7.0
        drawn[:4] = 10.0
        k[0, h] = key_size * topic + drawn / common_size * common + 0.5 * randn(N, D)
        v[0, h] = randn(N, D)
        for i in range(h * group, (h + 1) * group):
            sharpness = 6.0 + 2.0 * i / max(1, Hq - 1)
            q[0, i] = sharpness / key_size * topic + common_size * common + 0.5 * randn(N, D)
    return q, k, v


ROUNDS = 3
_COLD = 256 << 20  # bytes; more than any level-2 cache


@frozen
class Figure:
    """A time, or why there is none."""

    ms: float | None = None  # median of all repeats
    spread: float | None = None  # of the medians of the rounds: largest over smallest, minus 1
    why: str | None = None

    def as_row(self) -> dict[str, Any]:
        """The figure as JSON values."""
        return {name: x for name, x in asdict(self).items() if x is not None}


def medians(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, budget_ms: float
) -> dict[str, Figure]:
    """Milliseconds of each call: three rounds, each with up to 100 repeats, as a third of the budget has room for.

    Every round has a different order, or one call would always run after the same other call.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        once = min(repeated(call, 2, device))
        repeats[name] = max(1, min(100, int(budget_ms / ROUNDS / max(once, 1e-3))))
    warm_up = 0 if device.type == "cpu" else 1
    for turn in range(ROUNDS):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            repeated(calls[name], warm_up * repeats[name], device)
            times[name].append(repeated(calls[name], repeats[name], device))
    return {name: _figure(rounds) for name, rounds in times.items()}


def _figure(rounds: list[list[float]]) -> Figure:
    middles = [statistics.median(times) for times in rounds]
    return Figure(statistics.median(chain.from_iterable(rounds)), max(middles) / min(middles) - 1)


def repeated(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of single calls; on a GPU as `triton.testing.do_bench` has it, by events and from a cold L2."""
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    cold = torch.empty(_COLD, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start_event, end_event in events:
        cold.zero_()
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(device)
    return [float(start_event.elapsed_time(end_event)) for start_event, end_event in events]


DENSE = "dense"


@final
@frozen
class Shape:
    """Shape of the inputs: one prompt, causal."""

    heads: int  # Hq
    kv_heads: int  # Hkv
    head_dim: int  # D
    dtype: torch.dtype
    device: torch.device


@final
@frozen
class Row:
    """One method at one length."""

    tokens: int
    method: str
    ms: float | None = None  # median of whole calls: ordering, scoring, selecting and attending
    spread: float | None = None  # of the medians of three rounds: largest over smallest, minus 1
    speed_up: float | None = None  # dense attention's time over this one's
    density: float | None = None  # work as a share of dense attention's, mean over heads
    executor: str | None = None  # which one runs, and why not the faster ones
    why: str | None = None  # why there is no time


@torch.inference_mode()
def run(
    shape: Shape,
    lengths: Sequence[int],
    pipelines: Mapping[str, AnyPipeline],
    *,
    seconds: float,
    seed: int,
    on_length: Callable[[int], None] = lambda _: None,
) -> list[Row]:
    """A row for dense attention and one for each pipeline at every length, in rising order of lengths.

    A method that cannot run has a row that says why.

    Args:
        seconds: what the timed calls of one method at one length may take. From 3 to 300 calls are made.
        on_length: called before each length.
    """
    rows: list[Row] = []
    for tokens in sorted(set(lengths)):
        on_length(tokens)
        if shape.device.type == "cuda":
            torch.cuda.empty_cache()
        rows += _at(shape, tokens, pipelines, seconds=seconds, seed=seed)
    return rows


def _at(
    shape: Shape, tokens: int, pipelines: Mapping[str, AnyPipeline], *, seconds: float, seed: int
) -> list[Row]:
    calls: dict[str, Callable[[], object]] = {}
    density: dict[str, float] = {DENSE: 1.0}
    executor: dict[str, str] = {}
    why: dict[str, str] = {}
    with torch.random.fork_rng(devices=[shape.device] if shape.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            q, k, v = structured(tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.device, shape.dtype)
        except RuntimeError as error:
            return [Row(tokens, method, why=_reason(error)) for method in (DENSE, *pipelines)]
    calls[DENSE] = partial(dense_attention, q, k, v, AttentionSpec(scale=shape.head_dim**-0.5))
    for method, pipeline in pipelines.items():
        try:
            trace = pipeline.trace(q, k, v)
            density[method] = float(trace.density().mean())
            executor[method] = executor_of(pipeline, trace)
            calls[method] = partial(pipeline, q, k, v)
        except (TypeError, ValueError, RuntimeError) as error:  # who cannot run is a row that says why
            why[method] = _reason(error)
    times = medians(calls, device=shape.device, budget_ms=1e3 * seconds)
    rows = []
    for method in (DENSE, *pipelines):
        time, dense = times.get(method, Figure()), times[DENSE].ms
        faster = dense / time.ms if dense and time.ms else None
        measured = time.ms, time.spread, faster, density.get(method), executor.get(method), why.get(method)
        rows.append(Row(tokens, method, *measured))
    return rows


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    return " ".join(str(error).split())


@final
@frozen
class Crossover:
    """Break-even length of a method against dense attention."""

    tokens: float | None  # None if it is not faster at the longest length that was measured
    at_most: bool = False  # it is faster at every length that was measured, of which this is the first

    @classmethod
    def of(cls, rows: Sequence[Row], method: str) -> Crossover:
        """Interpolate between the last length where dense attention is faster and the next.

        Between two lengths, the logarithm of the speed-up is taken as linear in the logarithm of the length, as it
        is where both times grow as powers of the length.
        """
        points = [(row.tokens, math.log(row.speed_up)) for row in rows if row.method == method and row.speed_up]
        slower = [i for i, (_, gain) in enumerate(points) if gain <= 0]
        if not points or slower[-1:] == [len(points) - 1]:
            return cls(None)
        if not slower:
            return cls(float(points[0][0]), at_most=True)
        (before, loss), (after, gain) = points[slower[-1] : slower[-1] + 2]
        return cls(before * (after / before) ** (loss / (loss - gain)))


def table(rows: Sequence[Row]) -> str:
    """One line per length and method; lengths and times are right-aligned."""
    cells = [("tokens", "method", "time", "speed-up", "density", "")]
    before = None
    for row in rows:
        tokens = "" if row.tokens == before else f"{row.tokens:,}"
        before = row.tokens
        cells.append(
            (
                tokens,
                row.method,
                "-" if row.ms is None else _time(row.ms),
                "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
                "-" if row.density is None else f"{row.density:.1%}",
                row.why or "",
            )
        )
    width = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join(
        f"{tokens:>{width[0]}}  {method:<{width[1]}}  {time:>{width[2]}}  {faster:>{width[3]}}  "
        f"{density:>{width[4]}}  {why}".rstrip()
        for tokens, method, time, faster, density, why in cells
    )


def crossovers(rows: Sequence[Row]) -> str:
    """A sentence per preset: from which length on it is faster than dense attention."""
    methods = dict.fromkeys(row.method for row in rows if row.method != DENSE)
    return "\n".join(f"{method} {_crossover(rows, method)}" for method in methods)


def legend(rows: Sequence[Row]) -> str:
    """Explanation of the columns, and the executors that ran."""
    lines = [
        "time: median of whole causal calls: ordering, scoring, selecting and attending",
        "speed-up: of dense attention's time over this one; dense is the fastest kernel here",
        "density: work as a share of dense attention's, on random inputs whose heads look at topics,",
        "at a system prompt and at a few heavy keys; that of your prompts may differ, and time follows it",
    ]
    if shaky := max((row.spread for row in rows if row.spread is not None), default=0.0):
        lines.append(f"medians of three rounds differ by up to {shaky:.0%}")
    ran: dict[str, list[str]] = {}
    for row in rows:
        if row.executor is not None and row.method not in ran.setdefault(row.executor, []):
            ran[row.executor].append(row.method)
    for executor, methods in ran.items():
        lines.append(f"{', '.join(methods)}: {executor}")
    return "\n".join(lines)


def _crossover(rows: Sequence[Row], method: str) -> str:
    found, ran = Crossover.of(rows, method), [row.tokens for row in rows if row.method == method and row.speed_up]
    if not ran:
        return "ran at no length"
    if found.tokens is None:
        longest = "measured" if ran[-1] == rows[-1].tokens else "at which it ran"
        return f"is not faster than dense attention at {ran[-1]:,} tokens, the longest length {longest}"
    if found.at_most:
        return f"is faster than dense attention at every length measured, from {found.tokens:,.0f} tokens on"
    # Two digits that count, as the lengths between which it lies are far apart; and up, to where it is faster.
    step = 10 ** max(math.floor(math.log10(found.tokens)) - 1, 0)
    return f"is faster than dense attention from about {math.ceil(found.tokens / step) * step:,} tokens on"


def _time(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3f} ms"


def device_name(device: torch.device) -> str:
    """The name of a GPU, or how many threads a CPU has."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def executor_of(pipeline: AnyPipeline, trace: AnyTrace) -> str:
    """The executor of `pipeline` that runs inputs like those of `trace`, and why faster ones cannot."""
    if trace.dense_because is not None:
        return f"dense attention runs: {trace.dense_because}"
    if isinstance(pipeline.executor, AutoExecutor):
        return str(pipeline.executor.choose(trace.q, trace.k, trace.v, trace.mask, trace.spec))
    return type(pipeline.executor).__name__

"""Time dense attention and presets at several lengths, and say from which length on each preset is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from attrs import frozen

from blocksparse.bench.inputs import structured
from blocksparse.bench.timing import Figure, medians
from blocksparse.demo.methods import executor_of
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.spec import AttentionSpec

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
        seconds: what the timed calls of one method at one length may take; three calls are made at least.
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

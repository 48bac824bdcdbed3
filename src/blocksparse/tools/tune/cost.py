"""Units with their own choice, what candidates do there, and what they cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, Heads
from blocksparse.layers.schedule import LayerPipeline

DENSE = "dense"  # the name of dense attention among those of candidates


@final
@frozen
class Unit:
    """Some consecutive KV heads of a layer, with the query heads that belong to them."""

    layer: int
    heads: Heads
    kv_heads: int  # of the whole layer

    def __str__(self) -> str:
        return (
            f"{self.layer}"
            if len(self.heads) == self.kv_heads
            else f"{self.layer}:{self.heads[0]}-{self.heads[-1]}"
        )

    @classmethod
    def of_layer(cls, layer: int, kv_heads: int, groups: int) -> list[Unit]:
        """A layer in so many groups of KV heads, as equal as can be."""
        cuts = [kv_heads * group // groups for group in range(groups + 1)]
        return [cls(layer, tuple(range(a, b)), kv_heads) for a, b in pairwise(cuts)]

    def part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its heads of q `[B, Hq, M, D]`, k and v `[B, Hkv, N, D]`; views."""
        first, last, size = self.heads[0], self.heads[-1] + 1, q.shape[1] // k.shape[1]
        return q[:, first * size : last * size], k[:, first:last], v[:, first:last]

    def alone(self, pipeline: AnyPipeline) -> LayerPipeline:
        """The attention of the layer if only this unit is sparse."""
        others = tuple(head for head in range(self.kv_heads) if head not in self.heads)
        return HeadGroups({self.heads: pipeline, others: None}) if others else pipeline


Key = tuple[Unit, str]
"""A unit, and the name of what attends there."""


@final
@frozen
class Evaluation:
    """One candidate on the q, k and v of one unit."""

    density: float
    error: float  # relative L1 distance of the output from dense attention's


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call, after calls that compile and warm up: the median of some on a GPU, else the least.

    On a GPU the calls follow one another as they do in a model, so that the host's time counts only where the GPU
    would wait for it.
    """
    call()
    if device.type == "cuda":
        call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return float(statistics.median(spans[1:]))  # the host has no lead in the first one yet
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times)


@final
@frozen
class Line:
    """Milliseconds as `overhead + slope * density`, neither below 0."""

    overhead: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line that fits pairs of density and milliseconds best, by least squares."""
        import numpy as np
        from scipy.optimize import nnls

        density, ms = np.array(points, dtype=float).T
        (overhead, slope), _ = nnls(np.stack((np.ones_like(density), density), axis=1), ms)
        return cls(float(overhead), float(slope))

    def at(self, density: float) -> float:
        return self.overhead + self.slope * density


@final
@frozen(eq=False)
class Costs:
    """Cost of each candidate in each unit, from its density there and its line of time over density."""

    density: Mapping[Key, float]
    lines: Mapping[str, Line]  # by candidate
    dense_ms: float  # of a whole layer
    minimise: str  # "time" or "density"

    @classmethod
    def of(
        cls, evaluations: Mapping[Unit, Mapping[str, Evaluation]], times: Mapping[Key, float], minimise: str
    ) -> Costs:
        """Of densities of all units and times of some, in which dense attention has the name "dense"."""
        density = {
            (unit, name): evaluation.density
            for unit, some in evaluations.items()
            for name, evaluation in some.items()
        }
        names = {name for _, name in times if name != DENSE}
        return cls(
            density,
            {
                name: Line.through([(density[unit, name], ms) for (unit, of), ms in times.items() if of == name])
                for name in names
            },
            statistics.fmean(ms for (_, name), ms in times.items() if name == DENSE),
            minimise,
        )

    def ms(self, unit: Unit, name: str) -> float:
        """Predicted milliseconds of a candidate, or of "dense", in one unit."""
        if name == DENSE:
            return self.dense_ms * len(unit.heads) / unit.kv_heads
        return self.lines[name].at(self.density[unit, name])

    def __call__(self, unit: Unit, name: str) -> float:
        """The cost to minimise."""
        if self.minimise == "time":
            return self.ms(unit, name)
        return 1.0 if name == DENSE else self.density[unit, name]

"""The table `choosing`: what it takes to choose blocks, by what scorers look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.kernel_tables import Row, density_of
from benchmarks.timing import attempt, medians, release

AnyScorer = bs.Scorer[bs.GlobalPermutation, bs.BlockMass]
SCORERS: dict[str, AnyScorer] = {
    **{
        f"sums of cells, stride {stride}": bs.AntidiagonalScorer(stride, block=128, pattern="sum")
        for stride in (32, 16, 8, 4)
    },
    "antidiagonals, stride 8, blocks of 64": bs.AntidiagonalScorer(8, block=64),
    "mean pooling": bs.MeanPoolScorer(128),
}
SELECTOR = bs.TopCdf(0.9) | bs.Band(128)


def choosing(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Scores alone, and scores with the choice of blocks, on structured inputs; all at one length take turns."""
    for N in plan.kernel_lengths:
        release(device)
        q, k, _ = plan.inputs(N, device)
        yield attempt({"N": N}, partial(_choosing, q, k, plan.budget_ms))


def _choosing(q: Tensor, k: Tensor, budget_ms: float) -> Row:
    spec = bs.AttentionSpec(scale=q.shape[-1] ** -0.5)
    permutation = bs.Identity()(q, k, spec)
    calls: dict[str, Callable[[], object]] = {}
    densities = {}
    for name, scorer in SCORERS.items():
        score = partial(scorer, q, k, permutation, spec)
        calls[name], calls[f"{name}, chosen"] = score, partial(_choose, score)
        densities[name] = density_of(_choose(score))
    figures = medians(calls, device=q.device, budget_ms=budget_ms)
    return {"densities": densities, "figures": {name: figure.as_row() for name, figure in figures.items()}}


def _choose(score: Callable[[], bs.BlockMass]) -> bs.BlockMask:
    return SELECTOR(score())

"""Tables of what a call is made of, on structured inputs: `stages`, and `growth` to very long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import AnyPipeline, Plan
from benchmarks.kernel_tables import Row, density_of, pairs_kept
from benchmarks.peers import kernel_call
from benchmarks.timing import Candidate, attempt, check, measure, medians, peak_bytes, ready, release
from blocksparse.execute.launched import BlockPlan


def stages(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Where the time of each preset goes, and the memory of a plain call beyond its inputs and output."""
    for N in plan.lengths:
        release(device)
        q, k, v = plan.inputs(N, device)
        for preset in plan.presets:
            if preset.longest >= N:
                pipeline = plan.pipeline(preset, sparse=True)
                work = partial(_stages_of, pipeline, q, k, v, plan.budget_ms)
                yield attempt({"N": N, "preset": preset.name}, work)


def _stages_of(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor, budget_ms: float) -> Row:
    extra_bytes = peak_bytes(lambda: pipeline(q, k, v), q.device)
    trace = pipeline.trace(q, k, v)
    check(trace.output.out, q, k, v, trace.visited)
    mask, steps = trace.mask, steps_of(pipeline, trace)
    if mask.grid.group_of_row is None:  # else the executor walks index maps, not lists
        steps["plan"] = lambda: BlockPlan.of(mask)
    figures = medians(steps, device=q.device, budget_ms=budget_ms)
    return {
        "density": density_of(trace.visited),
        "extra_bytes": extra_bytes,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


def steps_of(pipeline: AnyPipeline, trace: bs.Trace[Any, Any, Any]) -> dict[str, Callable[[], object]]:
    """The stages of a causal call, each by itself on what the stages before it gave."""
    q, k, v, scale = trace.q, trace.k, trace.v, trace.spec.scale
    permutation, scores, mask = trace.permutation, trace.scores, trace.mask
    return {
        "permute": lambda: pipeline.permuter(q, k, bs.AttentionSpec(scale=scale)),
        "score": lambda: pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=scale)),
        # A grid remembers its refinement, and a call makes both.
        "select": lambda: pipeline.selector(evolve(scores, grid=evolve(scores.grid))),
        "attend": lambda: pipeline.executor(q, k, v, mask, bs.AttentionSpec(scale=scale)),
    }


def growth(plan: Plan, device: torch.device) -> Iterator[Row]:
    """From short prompts to very long ones: the kernel's time per kept block, whole calls, and their memory."""
    for N, share in plan.growth:
        release(device)
        yield attempt({"N": N, "share": share}, partial(_growth_of, plan, N, share, device))


def _growth_of(plan: Plan, N: int, share: float, device: torch.device) -> Row:
    q, k, v = plan.inputs(N, device)
    first = plan.pipeline(plan.presets[0], sparse=True)
    pipeline = bs.Pipeline(first.permuter, first.scorer, bs.TopK(share=share), first.executor)
    extra_bytes = peak_bytes(lambda: pipeline(q, k, v), device)
    trace = pipeline.trace(q, k, v)
    permutation, mask = trace.permutation, trace.mask
    del trace
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    figures = measure(
        {
            "kernel": Candidate(partial(kernel_call, q, k, v, mask, permutation=permutation), verify),
            "whole call": Candidate(ready(partial(pipeline, q, k, v)), verify),
        },
        device=device,
        budget_ms=plan.budget_ms,
    )
    pairs = pairs_kept(mask)
    return {
        "density": density_of(mask),
        "kept_blocks": pairs // (mask.grid.q_block * mask.grid.k_block),
        "tflop": 4e-12 * plan.D * pairs,
        "extra_bytes": extra_bytes,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }

"""The table `audit`: what an audit of 64 random queries of each head costs beside the call that it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import AnyPipeline, Plan
from benchmarks.kernel_tables import Row, density_of
from benchmarks.timing import attempt, check, medians, release
from blocksparse.observe import Audit, AuditedAttention

ROWS, EVERY = 64, 64  # the defaults of `Audit`


def audit(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Whole calls without and with an audit, on structured inputs; the share is for an audit of one call in 64."""
    for N in plan.lengths:
        release(device)
        q, k, v = plan.inputs(N, device)
        for preset in plan.presets:
            if preset.longest >= N:
                pipeline = plan.pipeline(preset, sparse=True)
                yield attempt({"N": N, "preset": preset.name}, partial(_costs, pipeline, q, k, v, plan.budget_ms))


def _costs(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor, budget_ms: float) -> Row:
    audited = AuditedAttention(pipeline, 0, Audit(ROWS, every=1))
    counted = AuditedAttention(pipeline, 0, Audit(ROWS, every=1 << 30))
    trace = pipeline.trace(q, k, v)
    check(trace.output.out, q, k, v, trace.visited)
    density = density_of(trace.visited)
    del trace
    calls: dict[str, Callable[[], object]] = {
        "call": partial(pipeline, q, k, v),
        "counted": partial(counted, q, k, v),
        "audited": partial(audited, q, k, v),
    }
    figures = medians(calls, device=q.device, budget_ms=budget_ms)
    plain, beside, whole = (figures[name].ms or float("nan") for name in calls)
    return {
        "density": density,
        "rows": ROWS,
        "every": EVERY,
        "share": (beside - plain + (whole - beside) / EVERY) / plain,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }

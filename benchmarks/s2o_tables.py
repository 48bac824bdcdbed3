"""The table `s2o`: index maps, attention and whole calls of `bs.s2o`, and their error, against dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import AnyPipeline, Plan
from benchmarks.inputs import QKV, everything
from benchmarks.kernel_tables import Row
from benchmarks.peers import DENSE
from benchmarks.report import CALLS
from benchmarks.timing import (
    Candidate,
    Figure,
    attempt,
    check,
    check_near,
    measure,
    medians,
    peak_bytes,
    ready,
    relative_l1,
    release,
    some_rows,
)

WHOLE, CUDNN = CALLS


def s2o(plan: Plan, device: torch.device) -> Iterator[Row]:
    """The preset, with exact maps too at the least length; large segments, by threshold at the greatest."""
    for N in plan.kernel_lengths:
        release(device)
        qkv = plan.inputs(N, device)
        q, k, v = qkv
        at = some_rows(N, device)
        dense = dense_rows(q, k, v, at)
        taus = plan.taus if max(plan.kernel_lengths) <= N else plan.taus[:1]
        exact = min(plan.kernel_lengths) >= N
        rows: list[tuple[str, Row]] = []
        candidates = {
            CUDNN: Candidate(
                partial(DENSE[CUDNN], q, k, v),
                partial(check, q=q, k=k, v=v, mask=everything(q, k)),
            )
        }
        for method, tau, pipeline in settings(plan, taus, exact=exact):
            work = partial(_parts_of, pipeline, qkv, at, dense, plan.budget_ms)
            name, row = f"{method}, {tau}", attempt({"method": method, "tau": tau}, work)
            if (out := row.pop("rows", None)) is not None:
                candidates[name] = Candidate(ready(partial(pipeline, q, k, v)), partial(_same, at=at, want=out))
            rows.append((name, row))
        figures = measure(candidates, device=device, budget_ms=plan.budget_ms)
        for name, row in rows:
            calls = {WHOLE: figures.get(name, Figure()), CUDNN: figures[CUDNN]}
            parts = row.get("figures", {}) | {name: figure.as_row() for name, figure in calls.items()}
            yield {"N": N} | row | {"figures": parts}


def settings(plan: Plan, taus: tuple[float, ...], *, exact: bool) -> Iterator[tuple[str, float, AnyPipeline]]:
    """A name, a threshold and a pipeline; large segments with every threshold, all else with the first alone."""
    yield "default", taus[0], bs.s2o(taus[0])
    if exact:
        yield "exact, all keys", taus[0], bs.s2o(taus[0], prefix=None, coarse=False)
    S, block = plan.segment, plan.blocks[0][0]
    for heads, each in (("query", True), ("KV", False)):
        for tau in sorted(taus):
            coarse = bs.s2o(tau, S=S, block=block, prefix=plan.prefix, coarse=True, per_query_head=each)
            yield f"S={S}, block {block}, per {heads} head", tau, coarse


def _parts_of(pipeline: AnyPipeline, qkv: QKV, at: Tensor, dense: Tensor, budget_ms: float) -> Row:
    """Time, memory, density and error; and the output in the rows `at`, which a whole call must give again."""
    q, k, v = qkv
    release(q.device)
    extra_bytes = peak_bytes(lambda: pipeline(q, k, v), q.device)
    scale, trace = q.shape[-1] ** -0.5, pipeline.trace(q, k, v)
    check(trace.output.out, q, k, v, trace.visited)
    out, density = trace.output.out[:, :, at], float(trace.density().mean())
    permutation, mask = trace.permutation, trace.mask
    del trace  # its scores and its output
    first: dict[str, Callable[[], object]] = {
        "index": lambda: pipeline.permuter(q, k, bs.AttentionSpec(scale=scale)),
        "rank": lambda: pipeline.selector(pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=scale))),
    }
    attend = {"attend": lambda: pipeline.executor(q, k, v, mask, bs.AttentionSpec(scale=scale))}
    figures = medians(first, device=q.device, budget_ms=budget_ms / 3)
    figures |= medians(attend, device=q.device, budget_ms=budget_ms)
    return {
        "density": density,
        "l1": float(relative_l1(out, dense).mean()),
        "extra_bytes": extra_bytes,
        "rows": out,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


def _same(out: Tensor, *, at: Tensor, want: Tensor) -> None:
    check_near(out[:, :, at], want, tolerance=1e-2)


def dense_rows(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Dense causal attention of the queries `at`, in float64 and a head at a time, `[1, Hq, len(at), Dv]`."""
    group, heads = q.shape[1] // k.shape[1], []
    future = torch.arange(k.shape[2], device=k.device) > at[:, None] + (k.shape[2] - q.shape[2])
    for h in range(q.shape[1]):
        keys, values = (x[0, h // group].double() for x in (k, v))
        logits = (q[0, h, at].double() @ keys.T * q.shape[-1] ** -0.5).masked_fill_(future, float("-inf"))
        heads.append(logits.softmax(-1) @ values)
    return torch.stack(heads)[None]

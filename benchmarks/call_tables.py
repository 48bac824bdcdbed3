"""Tables of whole calls against dense attention: `calls` on structured inputs, and `cpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from benchmarks.cases import AnyPipeline, Plan
from benchmarks.inputs import Case, everything
from benchmarks.kernel_tables import Row, density_of
from benchmarks.peers import DENSE, FLEX, DensePeer, Peer, flex_call
from benchmarks.timing import (
    Call,
    Candidate,
    CannotRunError,
    Figure,
    attempt,
    check,
    measure,
    peak_bytes,
    ready,
    release,
)
from blocksparse.execute.dense_attention import dense_attention

GRAPH = ", CUDA graph"


def calls(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Whole calls against dense attention; PBS-Attn at the density asked for too, and as a CUDA graph."""
    for N in plan.lengths:
        release(device)
        q, k, v = plan.inputs(N, device)
        rows: dict[str, Row] = {}
        candidates: dict[str, Candidate] = {}

        whole = everything(q, k)
        everyone: dict[str, DensePeer] = dict(DENSE)
        if device.type == "cuda":
            everyone[f"{FLEX} dense"] = partial(flex_call, mask=whole)
        for name, dense in everyone.items():
            rows[name] = {"dense": True, "density": 1.0}
            candidates[name] = Candidate(partial(dense, q, k, v), partial(check, q=q, k=k, v=v, mask=whole))

        presets = {preset.name: plan.pipeline(preset) for preset in plan.presets if preset.automatic}
        first = plan.presets[0].name
        threshold, at_density = _at_density(presets[first], q, k, plan.call_density)
        sparse = {f"{first}({threshold:.3f})": at_density, **presets}
        for name, pipeline in sparse.items():
            rows[name] = attempt({"dense": False}, partial(_whole_call, plan, pipeline, q, k, v))
            mask = rows[name].pop("mask", None)
            if mask is not None:
                verify = partial(check, q=q, k=k, v=v, mask=mask)
                candidates[name] = Candidate(ready(partial(pipeline, q, k, v)), verify)
        figures = measure(candidates, device=device, budget_ms=plan.budget_ms)
        # Captures apart and last: one that fails may leave the device in disorder.
        graphs: dict[str, Candidate] = {}
        for name in list(sparse)[:2]:
            if name in candidates:
                rows[name + GRAPH] = rows[name] | {"extra_bytes": None}
                graphs[name + GRAPH] = Candidate(partial(captured, sparse[name], q, k, v), candidates[name].verify)
        figures |= measure(graphs, device=device, budget_ms=plan.budget_ms)
        for name, row in rows.items():
            yield {"N": N, "method": name} | row | figures.get(name, Figure()).as_row()


def _at_density(pipeline: AnyPipeline, q: Tensor, k: Tensor, density: float) -> tuple[float, AnyPipeline]:
    """PBS-Attn with the threshold that comes nearest to a density, to three decimals."""
    scale = q.shape[-1] ** -0.5
    permutation = pipeline.permuter(q, k, bs.AttentionSpec(scale=scale))
    scores = pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=scale))
    low, high = 1, 999
    while low < high:
        middle = (low + high) // 2
        mask = (bs.TopCdf(middle / 1000) | bs.Sink(1))(scores)
        if float(mask.density().mean()) < density:
            low = middle + 1
        else:
            high = middle
    selector = bs.TopCdf(low / 1000) | bs.Sink(1)
    return low / 1000, bs.Pipeline(pipeline.permuter, pipeline.scorer, selector, pipeline.executor)


def _whole_call(plan: Plan, pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor) -> Row:
    extra_bytes = peak_bytes(lambda: pipeline(q, k, v), q.device)
    trace = pipeline.trace(q, k, v)
    mask = trace.visited
    ran = str(plan.executor or bs.AutoExecutor().choose(q, k, v, mask, trace.spec))
    return {"density": density_of(mask), "ran": ran, "extra_bytes": extra_bytes, "mask": mask}


def captured(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """One whole call as a CUDA graph; what the capture wrote is overwritten, so that a replay must compute."""
    if not q.is_cuda:
        raise CannotRunError("CUDA graphs are for NVIDIA GPUs")
    side = torch.cuda.Stream(q.device)
    side.wait_stream(torch.cuda.current_stream(q.device))
    with torch.cuda.stream(side):
        for _ in range(2):
            pipeline(q, k, v)
    torch.cuda.current_stream(q.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pipeline(q, k, v)
    out.fill_(float("nan"))

    def call() -> Tensor:
        graph.replay()
        return out

    return call


def cpu(plan: Plan, device: torch.device, *, peers: Mapping[str, Peer] | None = None) -> Iterator[Row]:
    """`CpuExecutor`, block lists included, against dense SDPA and peers: 9 query heads and 3 KV heads.

    bf16 and fp32. The row says whether the executor has its compiled kernel.
    """
    for N, D, block, densities in plan.cpu:
        for density, dtype in product(densities, (torch.bfloat16, torch.float32)):
            case = Case(N, 9, 3, D, block, block, density, dtype)
            q, k, v = case.inputs(device)
            mask, everyone = case.mask(q, k), everything(q, k)
            right = partial(check, q=q, k=k, v=v, mask=mask)
            dense = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            figures = measure(
                {
                    "dense": Candidate(ready(dense), partial(check, q=q, k=k, v=v, mask=everyone)),
                    "dense_attention": Candidate(
                        ready(partial(dense_attention, q, k, v, bs.AttentionSpec(scale=D**-0.5))),
                        partial(check, q=q, k=k, v=v, mask=everyone),
                    ),
                    "CpuExecutor": Candidate(ready(partial(_attend, bs.CpuExecutor(), q, k, v, mask)), right),
                    **{
                        name: Candidate(partial(peer, q, k, v, mask), right)
                        for name, peer in (peers or {}).items()
                    },
                },
                device=device,
                budget_ms=8 * plan.budget_ms,
            )
            yield {
                "N": N,
                "D": D,
                "block": block,
                "dtype": str(dtype).removeprefix("torch."),
                "density": density_of(mask),
                "runs_by": bs.CpuExecutor().runs_by(q, k, v),
                "figures": {name: figure.as_row() for name, figure in figures.items()},
            }


def _attend(
    executor: bs.Executor[bs.GlobalPermutation, bs.BlockMask], q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask
) -> Tensor:
    return executor(q, k, v, mask, bs.AttentionSpec(scale=q.shape[-1] ** -0.5)).out

"""The table `serving`: whole calls at the shapes of servers, what the host pays, and where the GPU's time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from attrs import asdict, frozen
from torch import Tensor

import blocksparse as bs
from benchmarks.call_tables import GRAPH, captured
from benchmarks.cases import EMPTY_LAUNCHES, ONE_BY_ONE, AnyPipeline, Plan, Served
from benchmarks.gpu_work import empty_launches, work_of
from benchmarks.inputs import QKV, everything, structured
from benchmarks.kernel_tables import Row, density_of
from benchmarks.peers import DENSE, DENSE_CHUNK, DensePeer
from benchmarks.stage_tables import steps_of
from benchmarks.timing import Candidate, attempt, check, host_ms, measure, ready, release

PBS_ATTN, MEAN_POOLING, AUTO_EXECUTOR, AUTO = "pbs_attn", "mean_pooling", "AutoExecutor", "auto"


def serving(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Whole calls against dense attention, masks included; then graphs; then launches and stages, profiled."""
    budget_ms = plan.budget_ms / 3  # twenty shapes and more: fewer repeats than other tables have
    for case in plan.serving:
        release(device)
        yield attempt(_named(case, "calls"), partial(_calls, case, plan, device, budget_ms))
    # Captures behind what they could leave in disorder, and the profiler behind all that the host is timed in.
    for case in plan.serving:
        if case.graph:
            release(device)
            yield attempt(_named(case, "graph"), partial(_graph, case, plan, device, budget_ms))
    # The first profile of a process may miss kernels.
    attempt({}, partial(_work, partial(torch.zeros, 1, device=device), device))
    for case in plan.serving:
        release(device)
        yield attempt(_named(case, "launches"), partial(_launches, case, plan, device))
        for name in (PBS_ATTN, MEAN_POOLING) if case.stages else ():
            row = _named(case, "stages") | {"preset": name}
            yield attempt(row, partial(_stages, case, plan, device, name))


def _named(case: Served, part: str) -> Row:
    return {
        "part": part,
        "Hq": case.Hq,
        "Hkv": case.Hkv,
        "N": sum(case.keys),
        "keys": list(case.keys),
        "queries": case.queries,
        "D": case.D,
        "Dv": case.Dv or case.D,
    }


@frozen
class Batch:
    """The prompts of a case, and all of them as one call takes them."""

    prompts: list[QKV]
    q: Tensor  # [1, Hq, M, D]
    k: Tensor  # [1, Hkv, N, D]
    v: Tensor  # [1, Hkv, N, Dv]
    sequences: bs.Sequences | None  # None for one prompt

    @classmethod
    def of(cls, case: Served, plan: Plan, device: torch.device) -> Batch:
        prompts = []
        for N in case.keys:
            q, k, v = structured(N, case.Hq, case.Hkv, case.D, device, plan.dtype)
            q, v = q[:, :, N - (case.queries or N) :], v[..., : case.Dv or case.D]
            prompts.append((q.contiguous(), k, v.contiguous()))
        if len(prompts) == 1:
            return cls(prompts, *prompts[0], None)
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*prompts, strict=True))
        return cls(prompts, q, k, v, bs.Sequences.packed([case.queries or N for N in case.keys], case.keys))

    def attend(self, pipeline: AnyPipeline) -> Tensor:
        """All prompts in one call."""
        return pipeline(self.q, self.k, self.v, sequences=self.sequences)

    def outputs(self, out: Tensor) -> list[Tensor]:
        """What a call of all prompts gave to each of them."""
        return [out] if self.sequences is None else [span.rows(out) for span in self.sequences.spans]

    def candidate(self, pipeline: AnyPipeline) -> Candidate:
        """One call, checked against the blocks that a trace of it visits."""
        return Candidate(
            ready(partial(self.attend, pipeline)), lambda out: self.check(self.outputs(out), _visited(pipeline))
        )

    def each(
        self, calls_of: Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]
    ) -> Callable[[], list[Tensor]]:
        """One call after the other, each with one prompt that lies by itself."""
        calls = [calls_of(*prompt) for prompt in self.prompts]
        return lambda: [call() for call in calls]

    def check(self, outputs: Sequence[Tensor], mask_of: Callable[[Tensor, Tensor, Tensor], bs.BlockMask]) -> None:
        """Raise unless the outputs are what the masks of the prompts mean."""
        samples = 6 if len(self.prompts) == 1 else 2
        for (q, k, v), out in zip(self.prompts, outputs, strict=True):
            check(out, q, k, v, mask_of(q, k, v), samples=samples)


def _visited(pipeline: AnyPipeline) -> Callable[[Tensor, Tensor, Tensor], bs.BlockMask]:
    return lambda q, k, v: pipeline.trace(q, k, v).visited


def _pipelines(case: Served, plan: Plan) -> dict[str, AnyPipeline]:
    """Those that always select, `pbs_attn` as `AutoExecutor` runs it, and `auto`."""
    presets = {preset.name: preset for preset in plan.presets}
    pipelines = {
        PBS_ATTN: plan.pipeline(presets[PBS_ATTN], sparse=True),
        MEAN_POOLING: plan.pipeline(presets[MEAN_POOLING], sparse=True),
        AUTO_EXECUTOR: plan.pipeline(presets[PBS_ATTN]),
    }
    if case.D == plan.D:  # its blocks are of 64 x 64, and another head dim compiles one more kernel for them
        pipelines[AUTO] = bs.auto(executor=plan.executor or bs.AutoExecutor())
    return pipelines


def _calls(case: Served, plan: Plan, device: torch.device, budget_ms: float) -> Row:
    batch, pipelines = Batch.of(case, plan, device), _pipelines(case, plan)
    dense: Mapping[str, DensePeer] = DENSE if case.queries is None else DENSE_CHUNK
    candidates = {
        name: Candidate(partial(batch.each, peer), partial(batch.check, mask_of=lambda q, k, v: everything(q, k)))
        for name, peer in dense.items()
    }
    candidates |= {name: batch.candidate(pipeline) for name, pipeline in pipelines.items()}
    sparse = pipelines[PBS_ATTN]
    if batch.sequences is not None:
        one = partial(batch.each, lambda q, k, v: partial(sparse, q, k, v))
        candidates[ONE_BY_ONE] = Candidate(one, partial(batch.check, mask_of=_visited(sparse)))
    for size in case.page_sizes:
        name = f"{PBS_ATTN}, pages of {size}"
        candidates[name] = Candidate(partial(_paged, batch, size, sparse), candidates[PBS_ATTN].verify)
    figures = {
        name: figure.as_row() for name, figure in measure(candidates, device=device, budget_ms=budget_ms).items()
    }
    nothing = empty_launches(EMPTY_LAUNCHES, device)
    for name, pipeline in pipelines.items():
        if (ms := figures[name].get("ms")) is not None:
            repeats = max(3, min(20, int(2 * budget_ms / ms)))
            times = host_ms(partial(batch.attend, pipeline), nothing, device=device, repeats=repeats)
            figures[name] |= dict(zip(("host_ms", "empty_ms"), times, strict=True))
    shown = batch.sequences is None and "ms" in figures[PBS_ATTN]
    return {
        "density": density_of(sparse.trace(*batch.prompts[0]).visited) if shown else None,
        "dense": list(dense),
        "must": [asdict(must) for must in case.must],
        "figures": figures,
    }


def _paged(batch: Batch, page_size: int, pipeline: AnyPipeline) -> Callable[[], Tensor]:
    """The call on keys and values in pages of a cache, in disorder; tokens stand before heads, as in vLLM's."""
    lengths = [k.shape[2] for _, k, _ in batch.prompts]
    pages = [-(-N // page_size) for N in lengths]
    order = torch.randperm(sum(pages), device=batch.k.device)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=batch.k.device)
    caches = [x.new_zeros(len(order), page_size, x.shape[1], x.shape[3]) for x in (batch.k, batch.v)]
    for request, own in enumerate(order.split(pages)):
        table[request, : len(own)] = own
        for cache, x in zip(caches, batch.prompts[request][1:], strict=True):
            tokens = x[0].transpose(0, 1)  # [N, Hkv, D]
            whole = tokens.new_zeros(len(own) * page_size, *tokens.shape[1:])
            whole[: len(tokens)] = tokens
            cache[own] = whole.unflatten(0, (len(own), page_size))
    paged = bs.PageTable(table, lengths, page_size=page_size)
    sequences = paged.sequences([q.shape[2] for q, _, _ in batch.prompts])
    keys, values = (cache.transpose(1, 2) for cache in caches)
    return lambda: pipeline(batch.q, *paged.gather(keys, values), sequences=sequences)


def _graph(case: Served, plan: Plan, device: torch.device, budget_ms: float) -> Row:
    batch, pipeline = Batch.of(case, plan, device), _pipelines(case, plan)[PBS_ATTN]
    plain = batch.candidate(pipeline)
    graph = Candidate(partial(captured, pipeline, batch.q, batch.k, batch.v), plain.verify)
    figures = measure({PBS_ATTN: plain, PBS_ATTN + GRAPH: graph}, device=device, budget_ms=budget_ms)
    return {"figures": {name: figure.as_row() for name, figure in figures.items()}}


def _launches(case: Served, plan: Plan, device: torch.device) -> Row:
    batch, figures = Batch.of(case, plan, device), {}
    for name, pipeline in _pipelines(case, plan).items():
        figures[name] = attempt({}, partial(_work, partial(batch.attend, pipeline), device, whole=True))
    return {"figures": figures}


def _stages(case: Served, plan: Plan, device: torch.device, name: str) -> Row:
    pipeline = _pipelines(case, plan)[name]
    trace = pipeline.trace(*Batch.of(case, plan, device).prompts[0])
    steps = steps_of(pipeline, trace)
    return {"figures": {step: attempt({}, partial(_work, call, device)) for step, call in steps.items()}}


def _work(call: Callable[[], object], device: torch.device, *, whole: bool = False) -> Row:
    work = work_of(call, device)
    return {"ms": work.ms, "launches": work.launches} | ({} if whole else {"kernels": work.kernels})

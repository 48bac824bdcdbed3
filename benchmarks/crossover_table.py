"""The table `crossover`: from how much work on selecting blocks saves time, which `AutoExecutor` decides by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.inputs import everything, structured
from benchmarks.kernel_tables import Row
from benchmarks.timing import Candidate, check, measure, ready, release
from blocksparse.execute.auto import dense_operations, idle_factor
from blocksparse.execute.dense_attention import dense_attention

DENSE = "dense"
PRESETS = ("pbs_attn", "mean_pooling")


def crossover(plan: Plan, device: torch.device) -> Iterator[Row]:
    """`dense_attention` and whole calls that always select, in half precision and fp32, causal."""
    for dtype in (plan.dtype, torch.float32):
        for Hq, M, N in plan.crossover:
            release(device)
            q, k, v = structured(N, Hq, max(1, Hq * plan.Hkv // plan.Hq), plan.D, device, dtype)
            q = q[:, :, N - M :]
            spec = bs.AttentionSpec(scale=q.shape[-1] ** -0.5)
            dense = partial(dense_attention, q, k, v, spec)
            masks = {DENSE: everything(q, k)}
            calls = {DENSE: dense}
            for preset in plan.presets:
                if preset.name in PRESETS:
                    calls[preset.name] = partial(pipeline := plan.pipeline(preset, sparse=True), q, k, v)
                    masks[preset.name] = pipeline.trace(q, k, v).mask
            calls["auto"] = partial(auto := bs.auto(executor=plan.executor or bs.TritonExecutor()), q, k, v)
            masks["auto"] = auto.trace(q, k, v).mask
            candidates = {
                name: Candidate(ready(call), partial(check, q=q, k=k, v=v, mask=masks[name]))
                for name, call in calls.items()
            }
            yield {
                "Hq": Hq,
                "M": M,
                "N": N,
                "dtype": str(dtype).removeprefix("torch."),
                "operations": dense_operations(q, k, v, spec) * idle_factor(q),
                "figures": {
                    name: figure.as_row()
                    for name, figure in measure(candidates, device=device, budget_ms=plan.budget_ms).items()
                },
            }

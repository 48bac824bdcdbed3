"""Metrics for Prometheus: how many prompts went sparse, and what an audit finds.

Counters    `Counters`: how many prompts went sparse, and why others did not, for Prometheus.
Estimates   `Estimates`: what an audit finds in the layers of an engine, and how dense their calls are, for
            Prometheus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from blocksparse.hosts.serving.runs import Split
from blocksparse.layers.head_groups import AnyTrace, HeadGroupsTrace
from blocksparse.observe.audit import Audit

PROMPTS, TOKENS = "blocksparse_prompts", "blocksparse_prompt_tokens"


@lru_cache(maxsize=1)
def _counters_exported() -> tuple[Any, Any]:
    """Counters of this process; None in their places without `prometheus_client`, which servers bring.

    Where PROMETHEUS_MULTIPROC_DIR is set, the counters of all processes of a server are added up in that folder.
    """
    try:
        from prometheus_client import Counter as Exported
    except ModuleNotFoundError:
        return None, None
    what = "in one step, by whether they were sparse, or why not"
    return (
        Exported(PROMPTS, f"Prompts, or chunks of them, {what}", ["attention"]),
        Exported(TOKENS, f"Their tokens {what}", ["attention"]),
    )


@final
class Counters:
    """Counters of the prefill steps of one engine. The host knows all of it before the layers run.

    It is kept once per step, not per layer. Steps that only decode are not seen.
    """

    def __init__(self) -> None:
        self.prompts = Counter[str]()  # by "sparse", or why they were not
        self.tokens = Counter[str]()
        self._owner: str | None = None

    def is_of(self, layer: str) -> bool:
        """Whether this layer's group counts: the first that asks, since several groups see the same steps."""
        self._owner = self._owner or layer
        return self._owner == layer

    def saw(self, splits: Iterable[Split]) -> None:
        """Add the prompts of one step, by the kind of layers in which most of them are sparse."""
        split = max(splits, key=lambda split: len(split.sparse))
        prompts, tokens = split.reasons + Counter(sparse=len(split.sparse)), split.queries
        exported = _counters_exported()
        for mine, found, metric in zip((self.prompts, self.tokens), (prompts, tokens), exported, strict=True):
            for attention, n in found.items():
                if n and attention != "decode":
                    mine[attention] += n
                    if metric is not None:
                        metric.labels(attention).inc(n)

    def __str__(self) -> str:
        found = (f"{n} x {what} ({self.tokens[what]} tokens)" for what, n in self.prompts.most_common())
        return f"prompts: {', '.join(found) or 'none'}"


class _Gauges(NamedTuple):
    covered_mass: Any
    error: Any
    density: Any


@lru_cache(maxsize=1)
def _estimates_exported() -> _Gauges | None:
    """Gauges of this process; None without `prometheus_client`, which servers bring."""
    try:
        from prometheus_client import Gauge
    except ModuleNotFoundError:
        return None

    def gauge(name: str, about: str, *labels: str) -> Any:
        # With a process per GPU, each of which has some of the heads, the latest number counts.
        return Gauge(f"blocksparse_audit_{name}", about, labels, multiprocess_mode="mostrecent")

    return _Gauges(
        gauge("covered_mass", "Share of the dense attention weights on visited pairs.", "layer", "of"),
        gauge("error", "Relative L1 distance of the output from dense attention.", "layer", "of"),
        gauge("density", "Work of the latest audited call as a share of dense attention's.", "layer"),
    )


@final
class Estimates:
    """An audit, and gauges that are set to what it knows whenever it audits a call. Nothing waits for a GPU.

    Args:
        audit: which calls are compared with dense attention, and how.
    """

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._densities: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # on their way to the host

    def wants(self, layer: int) -> bool:
        """Count a sparse call of `layer`; whether it is to be audited."""
        return self.audit.begins(layer, may_audit=True)[1]

    def saw(self, layer: int, trace: AnyTrace | HeadGroupsTrace) -> None:
        """Audit a call, and tell what is known by now of earlier ones."""
        self.audit.compare(layer, trace)
        density, arrived = trace.density().mean(), None
        if density.is_cuda:
            host = torch.empty((), dtype=density.dtype, pin_memory=True)
            density = host.copy_(density, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        before = self._densities.pop(layer, None)
        self._densities[layer] = density, arrived
        if (gauges := _estimates_exported()) is None:
            return
        for value, there in (before, self._densities[layer]) if before else (self._densities[layer],):
            if there is None or there.query():
                gauges.density.labels(layer).set(float(value))
        for found in self.audit.layers(wait=False):
            for gauge, estimate in ((gauges.covered_mass, found.covered_mass), (gauges.error, found.error)):
                if estimate is not None:
                    for of in ("low", "high"):
                        gauge.labels(found.layer, of).set(getattr(estimate, of))
                    gauge.labels(found.layer, "estimate").set(estimate.value)

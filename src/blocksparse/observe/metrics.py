"""Metrics of an engine for Prometheus."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from blocksparse.layers.head_groups import LayerTrace
from blocksparse.observe.audit import Audit

PROMPTS, TOKENS = "blocksparse_prompts", "blocksparse_prompt_tokens"
DENSITY = "Work of the latest audited call as a share of dense attention's."


@cache
def _counters() -> tuple[Any, Any]:
    """Counters of this process, or with PROMETHEUS_MULTIPROC_DIR of all processes of a server."""
    from prometheus_client import Counter as Exported

    what = "in one step, by whether they were sparse, or why not"
    return (
        Exported(PROMPTS, f"Prompts, or chunks of them, {what}", ["attention"]),
        Exported(TOKENS, f"Their tokens {what}", ["attention"]),
    )


@cache
def _gauge(name: str, about: str, *labels: str) -> Any:
    """A gauge of this process. With a process per GPU, each with some of the heads, the latest number counts."""
    from prometheus_client import Gauge

    return Gauge(name, about, labels, multiprocess_mode="mostrecent")


@final
class PromptCounters:
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

    def saw(self, prompts: Counter[str], tokens: Counter[str]) -> None:
        """Add the prompts of one step, and their tokens: those that are "sparse", and others by the reason."""
        for mine, found, metric in zip((self.prompts, self.tokens), (prompts, tokens), _counters(), strict=True):
            for attention, n in found.items():
                if n and attention != "decode":
                    mine[attention] += n
                    metric.labels(attention).inc(n)

    def __str__(self) -> str:
        found = (f"{n} x {what} ({self.tokens[what]} tokens)" for what, n in self.prompts.most_common())
        return f"prompts: {', '.join(found) or 'none'}"


@final
class AuditGauges:
    """An audit, and gauges that are set to what it knows whenever it audits a call. Nothing waits for a GPU.

    Args:
        audit: which calls are compared with dense attention, and how.
    """

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._densities: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # on their way to the host

    def wants(self, layer: int) -> bool:
        """Count a call of `layer`; whether it is to be audited."""
        return self.audit.begins(layer, may_audit=True)[1]

    def saw(self, layer: int, trace: LayerTrace) -> None:
        """Audit a call, and tell what is known by now of earlier ones."""
        self.audit.compare(layer, trace)
        density, arrived = trace.density().mean(), None
        if density.is_cuda:
            host = torch.empty((), dtype=density.dtype, device="cpu", pin_memory=True)
            density = host.copy_(density, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        before = self._densities.pop(layer, None)
        self._densities[layer] = density, arrived
        density_of = _gauge("blocksparse_audit_density", DENSITY, "layer").labels(layer)
        for value, there in (before, self._densities[layer]) if before else (self._densities[layer],):
            if there is None or there.query():
                density_of.set(float(value))
        for family in self.audit.collect():
            if family.type == "gauge":  # counters of several processes would be added up
                for sample in family.samples:
                    gauge = _gauge(family.name, family.documentation, *sample.labels)
                    gauge.labels(**sample.labels).set(sample.value)

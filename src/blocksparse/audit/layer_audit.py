"""What an audit found in a layer, and how it is written for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from attrs import frozen

from blocksparse.audit.estimate import Estimate


@final
@frozen
class LayerAudit:
    """What an audit knows of one layer. The estimates are over its last audited calls."""

    layer: int
    calls: int  # sparse calls so far
    audited: int  # of these, how many were audited
    crossed: int  # of these, in how many a bound was crossed
    dense: bool  # whether the layer fell back to dense attention
    covered_mass: Estimate | None  # None before the first audited call
    error: Estimate | None


@final
@frozen
class Crossing:
    """One audited call whose interval lies beyond a bound."""

    layer: int
    covered_mass: Estimate  # of this call
    error: Estimate


def table(layers: Sequence[LayerAudit]) -> str:
    """A line per layer, under headings."""
    lines = [
        f"{'layer':>5}  {'calls':>6}  {'audited':>7}  {'covered mass':<24}  {'error':<24}  {'crossed':>7}  now"
    ]
    for x in layers:
        mass, error = ("-" if estimate is None else str(estimate) for estimate in (x.covered_mass, x.error))
        lines.append(
            f"{x.layer:>5}  {x.calls:>6}  {x.audited:>7}  {mass:<24}  {error:<24}  {x.crossed:>7}  "
            f"{'dense' if x.dense else 'sparse'}"
        )
    return "\n".join(lines)


_COUNTERS: dict[str, tuple[str, Callable[[LayerAudit], int]]] = {
    "calls_total": ("Sparse attention calls.", lambda x: x.calls),
    "audited_total": ("Sparse attention calls that were audited.", lambda x: x.audited),
    "crossed_total": ("Audited calls in which a bound was crossed.", lambda x: x.crossed),
}
_ESTIMATES: dict[str, tuple[str, Callable[[LayerAudit], Estimate | None]]] = {
    "covered_mass": ("Share of the dense attention weights on visited pairs.", lambda x: x.covered_mass),
    "error": ("Relative L1 distance of the output from dense attention.", lambda x: x.error),
}


def prometheus(layers: Sequence[LayerAudit]) -> str:
    """Prometheus' text format, version 0.0.4: three counters and three gauges with the label `layer`."""
    lines: list[str] = []

    def metric(name: str, kind: str, about: str, samples: Sequence[tuple[str, float]]) -> None:
        lines.extend((f"# HELP blocksparse_audit_{name} {about}", f"# TYPE blocksparse_audit_{name} {kind}"))
        lines.extend(f"blocksparse_audit_{name}{{{labels}}} {_written(value)}" for labels, value in samples)

    for name, (about, count) in _COUNTERS.items():
        metric(name, "counter", about, [(f'layer="{x.layer}"', count(x)) for x in layers])
    for name, (about, estimate) in _ESTIMATES.items():
        known = [(x.layer, found) for x in layers if (found := estimate(x)) is not None]
        samples = [
            (f'layer="{layer}",of="{of}"', number)
            for layer, found in known
            for of, number in (("estimate", found.value), ("low", found.low), ("high", found.high))
        ]
        metric(name, "gauge", about, samples)
    metric(
        "dense",
        "gauge",
        "Whether the layer fell back to dense attention.",
        [(f'layer="{x.layer}"', x.dense) for x in layers],
    )
    return "\n".join(lines) + "\n"


def _written(value: float) -> str:
    """A number as Prometheus reads it: it wants NaN and +Inf where Python writes nan and inf."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(str(float(value)), f"{value:.10g}")

"""Estimates of errors and densities, with confidence intervals, from a few random queries of each audited call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import UserError
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.layers.head_groups import AnyTrace


@final
@frozen
class Estimate:
    """A number that was estimated, and the interval that holds the true one with the confidence asked for."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} - {self.high:.4f})"


def ratio(numerator: Tensor, denominator: Tensor, *, confidence: float) -> Estimate:
    """`sum(numerator) / sum(denominator)` of a population, from `n` random members of it.

    The interval is Student's, for the mean of the linearised ratio, with Hall's transformation. A few queries have
    most of the error, and the plain interval of so skewed a sample ends too low. (P. Hall, On the removal of
    skewness by transformation, Journal of the Royal Statistical Society B 54, 1992.)

    Args:
        numerator: `[n]` float64 on the CPU.
        denominator: `[n]` float64 on the CPU.
        confidence: how often the interval holds the true ratio.
    """
    n = len(numerator)
    top, bottom = float(numerator.sum()), float(denominator.sum())
    if bottom == 0:
        value = 0.0 if top == 0 else math.inf
        return Estimate(value, value, value)
    value = top / bottom
    off = (numerator - value * denominator) / denominator.mean()  # their mean is 0
    spread = float(off.square().sum() / (n - 1)) ** 0.5
    if not math.isfinite(spread) or spread == 0:
        return Estimate(value, value, value)
    skewness = float((off / spread).pow(3).mean())
    quantile = _student((1 + confidence) / 2, n - 1)
    unit = spread / math.sqrt(n)
    low, high = (value - unit * _untransformed(side * quantile, skewness, n) for side in (1, -1))
    return Estimate(value, low, high)


def _untransformed(x: float, skewness: float, n: int) -> float:
    """The studentised mean that Hall's transformation takes to `x`; `x` itself where nothing is skewed."""
    bend = skewness / math.sqrt(n)
    if abs(bend) < 1e-6:
        return x
    return 3 / bend * (math.cbrt(1 + bend * (x - bend / 6)) - 1)


def _student(p: float, freedom: int) -> float:
    """The quantile of Student's t, by its expansion at the normal one, for 15 degrees of freedom or more."""
    z = NormalDist().inv_cdf(p)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@final
@frozen
class LayerAudit:
    """Results of an audit for one layer. The estimates are over its last audited calls."""

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


def families(layers: Sequence[LayerAudit]) -> list[Any]:
    """What was found as metrics of `prometheus_client`: three counters and three gauges with the label `layer`."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ModuleNotFoundError:
        raise UserError("prometheus_client is not installed: pip install prometheus_client") from None
    names = {
        "calls": "Sparse attention calls.",
        "audited": "Sparse attention calls that were audited.",
        "crossed": "Audited calls in which a bound was crossed.",
    }
    found: list[Any] = []
    for name, about in names.items():
        found.append(counter := CounterMetricFamily(f"blocksparse_audit_{name}", about, labels=["layer"]))
        for x in layers:
            counter.add_metric([str(x.layer)], getattr(x, name))
    names = {
        "covered_mass": "Share of the dense attention weights on visited pairs.",
        "error": "Relative L1 distance of the output from dense attention.",
    }
    for name, about in names.items():
        found.append(gauge := GaugeMetricFamily(f"blocksparse_audit_{name}", about, labels=["layer", "of"]))
        for x in layers:
            if (estimate := getattr(x, name)) is not None:
                for of, value in (("estimate", estimate.value), ("low", estimate.low), ("high", estimate.high)):
                    gauge.add_metric([str(x.layer), of], value)
    about = "Whether the layer fell back to dense attention."
    found.append(gauge := GaugeMetricFamily("blocksparse_audit_dense", about, labels=["layer"]))
    for x in layers:
        gauge.add_metric([str(x.layer)], x.dense)
    return found


_AT_ONCE = 8  # queries of each head; their logits over 131,072 keys and 32 heads take 128 MiB


def row_sums(trace: AnyTrace, rows: int, generator: torch.Generator) -> Tensor:
    """Compare random queries of a call with dense attention, `[4, rows]` float64, without waiting for the device.

    The queries are cut into `rows` stretches of equal length, and each head of each entry of the batch draws its
    own query from each stretch. Column `i` of the result has four sums over the draws from stretch `i`. The first
    is the covered mass, the share of the dense weights, sinks left out, that lies on visited pairs. The second is
    the number of draws. The others are `sum|o - o'|` and `sum|o'|` of the output `o` and dense attention's `o'`.

    Heads draw for themselves, because queries that are hard are often hard for many heads: a sample of 64
    positions may miss them, but hardly in every head.
    """
    q, k, v, output = trace.q, trace.k, trace.v, trace.output
    if (visited := output.visited_lse) is None:
        raise ValueError(
            "an audit needs an executor that gives lse, and FlexExecutor gives none on a CPU. Take CpuExecutor."
        )
    (B, Hq, M, _), N, causal = q.shape, k.shape[2], trace.mask.grid.causal
    stretch, query = M / rows, draw(B, Hq, M, rows, generator)
    key, spec = torch.arange(N, device=q.device), trace.spec
    sums = []
    for start in range(0, rows, _AT_ONCE):
        some = query[:, :, start : start + _AT_ONCE]
        # The host knows a key that no query of these stretches sees, without knowing the queries.
        end = min(N, N - M + int((start + _AT_ONCE) * stretch) + 1) if causal else N
        # [B, Hq, some, end]
        logits = spec.capped(products(_rows(q, some), k[:, :, :end]) * spec.scale)
        if causal:
            seen = trace.mask.grid.is_visible(some.unsqueeze(-1) + (N - M), key[:end])
            logits.masked_fill_(~seen, float("-inf"))
        most = logits.amax(-1, keepdim=True)
        weights = logits.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        plain = (most + total.log()).squeeze(-1)
        dense, lse = spec.with_sinks(_weighted(weights, v[:, :, :end]) / total, plain)
        # With a sink, both denominators have it, and its part is taken out again: the rest is `exp(plain - lse)`.
        more = visited.gather(2, some) - lse
        covered = more.exp() if spec.sinks is None else _without_sinks(more, plain - lse)
        distance = _rows(output.out, some).to(dense.dtype) - dense
        parts = covered, torch.ones_like(covered), distance.abs().sum(-1), dense.abs().sum(-1)
        sums.append(torch.stack([part.double().sum((0, 1)) for part in parts]))
    return torch.cat(sums, dim=1)


def _without_sinks(more: Tensor, keys: Tensor) -> Tensor:
    """The covered share of the weights of keys alone, from logarithms of shares of the whole dense softmax.

    Args:
        more: of what the sparse call has, its keys and the sink.
        keys: of what all keys have.
    """
    return (1 + more.expm1() / keys.exp().clamp_min(1e-30)).clamp(0, 1)


def draw(B: int, H: int, M: int, rows: int, generator: torch.Generator) -> Tensor:
    """One of M queries from each of `rows` stretches of equal length, `[B, H, rows]` int64, rising.

    Every query is as likely as every other one. If `rows` is M, each is drawn once.
    """
    inside = torch.rand((B, H, rows), dtype=torch.float64, device=generator.device, generator=generator)
    stretch = torch.arange(rows, device=generator.device)
    return ((stretch + inside) * (M / rows)).long().clamp_max(M - 1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` `[B, H, some]` of `x` `[B, H, M, D]`: `[B, H, some, D]`."""
    taken: Tensor = x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
    return taken


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """`weights` `[B, Hq, rows, N]`, from 0 to 1, times `v` `[B, Hkv, N, Dv]`, to fp32 or better.

    Tensor cores multiply half precision, but weights rounded to it would add an error as large as that of a good
    sparse call. So each weight is the sum of two numbers in half precision. The factor keeps small weights out of
    the range where fp16 has fewer digits.
    """
    if v.dtype == wide_dtype(v):
        exact: Tensor = products(weights, v.mT)
        return exact
    scaled = weights * 2.0**15
    high = scaled.to(v.dtype)
    low = (scaled - high).to(v.dtype)
    one, other = products(torch.cat((high, low), dim=2), v.mT).chunk(2, dim=2)
    total: Tensor = (one + other) * 2.0**-15
    return total

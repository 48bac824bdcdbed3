"""An audit compares some sparse calls with dense attention while a model runs, a few queries of each."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from statistics import NormalDist
from threading import RLock
from typing import Any, Unpack, final

import torch
from attrs import Factory, define, evolve, field, frozen
from torch import Tensor

from blocksparse.check.validators import Rule, UserError, flag, hash_seed, optional, size, whole
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.layout.gather import rows_at
from blocksparse.layers.head_groups import AnyTrace, Attention, HeadGroups, HeadGroupsTrace, LayerTrace
from blocksparse.spec import AttentionOptions, AttentionSpec


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
    calls: int  # so far, but for those after a fallback; some may have been little work, which is dense
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
    calls = "Attention calls of a pipeline, also those that it attended densely as they were little work."
    found: list[Any] = []
    for name, kind, about in (
        ("calls", CounterMetricFamily, calls),
        ("audited", CounterMetricFamily, "Of these, calls that were sparse and audited."),
        ("crossed", CounterMetricFamily, "Audited calls in which a bound was crossed."),
        ("dense", GaugeMetricFamily, "Whether the layer fell back to dense attention."),
    ):
        found.append(family := kind(f"blocksparse_audit_{name}", about, labels=["layer"]))
        for x in layers:
            family.add_metric([str(x.layer)], getattr(x, name))
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
        logits = spec.capped(products(rows_at(q, some), k[:, :, :end]) * spec.scale)
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
        covered = more.exp()
        if spec.sinks is not None:
            covered = (1 + more.expm1() / (plain - lse).exp().clamp_min(1e-30)).clamp(0, 1)
        distance = rows_at(output.out, some).to(dense.dtype) - dense
        parts = covered, torch.ones_like(covered), distance.abs().sum(-1), dense.abs().sum(-1)
        sums.append(torch.stack([part.double().sum((0, 1)) for part in parts]))
    return torch.cat(sums, dim=1)


def draw(B: int, H: int, M: int, rows: int, generator: torch.Generator) -> Tensor:
    """One of M queries from each of `rows` stretches of equal length, `[B, H, rows]` int64, rising.

    Every query is as likely as every other one. If `rows` is M, each is drawn once.
    """
    inside = torch.rand((B, H, rows), dtype=torch.float64, device=generator.device, generator=generator)
    stretch = torch.arange(rows, device=generator.device)
    return ((stretch + inside) * (M / rows)).long().clamp_max(M - 1)


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


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


_enough_rows = Rule("a whole number, at least 16", size.is_kind, lambda x: x >= 16)
_share = Rule("a number from 0 to 1", _is_number, lambda x: 0 <= x <= 1)
_above = Rule("a number, at least 0", _is_number, lambda x: x >= 0)
_confidence = Rule("a number from 0.5 to 0.9999", _is_number, lambda x: 0.5 <= x <= 0.9999)
_function = Rule("a function of a Crossing", callable)


@final
@define(eq=False)
class _State:
    """The counters and the samples of one layer."""

    samples: deque[Tensor]  # [4, rows] float64 each, on the CPU
    calls: int = 0
    audited: int = 0
    crossed: int = 0
    dense: bool = False
    turn: int = 0  # which of each `every` calls is audited


@final
@frozen(eq=False)
class _OnItsWay:
    """Sums that a GPU still computes."""

    layer: int
    sums: Tensor  # [4, rows] float64, in pinned memory if they come from a GPU
    arrived: torch.cuda.Event | None


@final
@define(eq=False)
class Audit:
    """Estimates of the covered mass and the error of sparse attention, layer by layer, while a model runs.

        audit = Audit(rows=64, every=64, max_error=0.1, fall_back=True)
        with attach(model, pbs_attn(), audit=audit):
            ...
        print(audit.table())

    One call in `every` of a layer is audited, at random. In it `rows` random queries of each head also attend
    densely, and the sparse output is compared with the dense one. Two numbers are estimated, over all queries of
    all sparse heads:

    * covered mass, the share of the dense attention weights that lies on visited pairs;
    * error, the relative L1 distance `sum|o - o'| / sum|o'|` of the output `o` from dense attention's `o'`.

    A bound is crossed in an audited call if the whole confidence interval of that call lies beyond it, or if an
    output is not finite. The model never waits for a GPU because of an audit, so the result of a call counts some
    calls later. An audit belongs to one model. It has its own random numbers, and leaves those of torch.

    Args:
        rows: random queries of each head in an audited call.
        every: one in `every` calls of each layer is audited.
        min_mass: lower bound for the covered mass. None for no bound.
        max_error: upper bound for the error. None for no bound.
        on_crossed: called with a `Crossing` for each call that crosses a bound. It runs in the thread that runs
            the model or reads the audit.
        fall_back: after a crossing the layer is dense. `resume` ends this.
        confidence: confidence level of the intervals.
        window: number of latest audited calls in the estimates.
        seed: seed of the random numbers.

    Raises:
        TypeError, ValueError: an argument is out of range, or `on_crossed` or `fall_back` has no bound.
    """

    rows: int = field(default=64, converter=whole, validator=_enough_rows)
    every: int = field(default=64, converter=whole, validator=size)
    min_mass: float | None = field(default=None, kw_only=True, validator=optional(_share))
    max_error: float | None = field(default=None, kw_only=True, validator=optional(_above))
    on_crossed: Callable[[Crossing], None] | None = field(
        default=None, kw_only=True, validator=optional(_function)
    )
    fall_back: bool = field(default=False, kw_only=True, validator=flag)
    confidence: float = field(default=0.95, kw_only=True, validator=_confidence)
    window: int = field(default=32, kw_only=True, converter=whole, validator=size)
    seed: int = field(default=0, kw_only=True, converter=whole, validator=hash_seed)
    _layers: dict[int, _State] = field(factory=dict, init=False, repr=False)
    _pending: deque[_OnItsWay] = field(factory=deque, init=False, repr=False)
    _lock: Any = field(factory=RLock, init=False, repr=False)  # several threads may run one model
    _random: random.Random = field(
        init=False, repr=False, default=Factory(lambda self: random.Random(self.seed), takes_self=True)
    )
    _generators: dict[torch.device, torch.Generator] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.min_mass is None and self.max_error is None and (self.on_crossed is not None or self.fall_back):
            raise ValueError("'on_crossed' and 'fall_back' need a bound. Give 'min_mass' or 'max_error'.")

    def layers(self, *, wait: bool = True) -> list[LayerAudit]:
        """The results, layer by layer. Waits for audits that a GPU still computes, or leaves them out."""
        self._receive(wait=wait)
        return self._all()

    def table(self) -> str:
        """A line per layer: calls, audited calls, covered mass and error with their intervals, crossings."""
        return table(self.layers())

    def collect(self) -> list[Any]:
        """Counters and gauges of every layer, as `prometheus_client` asks a collector for them.

            prometheus_client.REGISTRY.register(audit)

        It does not wait for audits that a GPU still computes: the next scrape has them.

        Raises:
            UserError: `prometheus_client` is not installed.
        """
        self._receive(wait=False)
        return families(self._all())

    def resume(self) -> None:
        """Let layers that fell back to dense attention be sparse again."""
        with self._lock:
            for state in self._layers.values():
                state.dense = False

    def crossed(self, layer: int) -> int:
        """Number of calls of a layer that crossed a bound, as far as known without waiting for a GPU."""
        self._receive(wait=False)
        with self._lock:
            return self._layers[layer].crossed if layer in self._layers else 0

    def begins(self, layer: int, *, may_audit: bool) -> tuple[bool, bool]:
        """Count a call of `layer`; return whether it must be dense, and whether it must be audited."""
        self._receive(wait=False)
        with self._lock:
            state = self._layers.setdefault(layer, _State(deque(maxlen=self.window)))
            if state.dense:
                return True, False
            place = state.calls % self.every
            if place == 0:
                state.turn = self._random.randrange(self.every)
            state.calls += 1
            return False, may_audit and place == state.turn

    def compare(self, layer: int, trace: LayerTrace) -> None:
        """Compare random queries of a call of `layer` with dense attention."""
        traces = trace.traces.values() if isinstance(trace, HeadGroupsTrace) else (trace,)
        # One that attended densely, as `AutoExecutor` does where that is little work, gives no lse.
        sparse = [x for x in traces if x is not None and (x.output.lse is not None or x.output.visited is None)]
        if not sparse:
            return
        device = sparse[0].q.device
        with self._lock:
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self.seed)
            parts = [row_sums(part, self.rows, self._generators[device]) for part in sparse]
            # Calls count by their queries, so that the chunks of a prompt have the figures of the whole prompt.
            sums, arrived = torch.stack(parts).sum(0) * sparse[0].q.shape[2], None
            if device.type == "cuda":
                host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
                sums = host.copy_(sums, non_blocking=True)
                with torch.cuda.device(device):
                    arrived = torch.cuda.Event()
                    arrived.record()
            self._pending.append(_OnItsWay(layer, sums, arrived))
        self._receive(wait=False)

    def _receive(self, *, wait: bool) -> None:
        """Take in what has arrived from the device, or all of it."""
        crossings = []
        with self._lock:
            while self._pending:
                first = self._pending[0]
                if first.arrived is not None:
                    if wait:
                        first.arrived.synchronize()
                    elif not first.arrived.query():
                        break
                self._pending.popleft()
                state = self._layers[first.layer]
                state.audited += 1
                state.samples.append(first.sums)
                mass, error = self._estimates(first.sums)
                if self._is_crossed(mass, error):
                    state.crossed += 1
                    state.dense = state.dense or self.fall_back
                    crossings.append(Crossing(first.layer, mass, error))
        if self.on_crossed is not None:
            for crossing in crossings:
                self.on_crossed(crossing)

    def _estimates(self, sums: Tensor) -> tuple[Estimate, Estimate]:
        covered, draws, distance, norm = sums
        mass = ratio(covered, draws, confidence=self.confidence)
        return mass, ratio(distance, norm, confidence=self.confidence)

    def _is_crossed(self, mass: Estimate, error: Estimate) -> bool:
        # Written so that NaN crosses every bound.
        little = self.min_mass is not None and not mass.high >= self.min_mass
        return little or (self.max_error is not None and not error.low <= self.max_error)

    def _all(self) -> list[LayerAudit]:
        with self._lock:
            found = []
            for layer, x in sorted(self._layers.items()):
                estimates = self._estimates(torch.cat(list(x.samples), dim=1)) if x.samples else (None, None)
                found.append(LayerAudit(layer, x.calls, x.audited, x.crossed, x.dense, *estimates))
            return found


@final
@frozen(eq=False)
class AuditedAttention:
    """The attention of one layer, under an audit. It is called like a `Pipeline`.

    Args:
        fallen_back: what traces say as `dense_because` after a fallback. If None, they have the density 1.
    """

    attention: Attention
    layer: int
    audit: Audit
    fallen_back: str | None = None
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        return attend(self._call, q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            return dense_attention(q, k, v, spec)
        if not audited:
            return self.attention(q, k, v, **spec.arguments())
        trace = self.attention.trace(q, k, v, **spec.arguments())
        self.audit.compare(self.layer, trace)
        return trace.output.out

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> LayerTrace:
        """Make the same call with the same arguments, and return every value of it."""
        dense, audited = self.audit.begins(self.layer, may_audit=not _is_captured(q))
        if dense:
            trace = HeadGroups({tuple(range(k.shape[1])): None}).trace(q, k, v, **options)
            return evolve(trace, dense_because=self.fallen_back)
        found = self.attention.trace(q, k, v, **options)
        if audited:
            self.audit.compare(self.layer, found)
        return found


def _is_captured(x: Tensor) -> bool:
    """Whether the call is recorded in a CUDA graph, which would replay one draw of queries for ever."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()

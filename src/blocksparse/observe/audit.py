"""An audit compares some sparse calls with dense attention while a model runs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Unpack, final

import torch
from attrs import Factory, define, evolve, field, frozen
from torch import Tensor

from blocksparse.check.validators import Rule, flag, hash_seed, optional, size, whole
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.layers.head_groups import AnyTrace, Attention, HeadGroups, HeadGroupsTrace, LayerTrace
from blocksparse.observe.estimate import Crossing, Estimate, LayerAudit, families, ratio, row_sums, table
from blocksparse.spec import AttentionOptions, AttentionSpec


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
        min_mass: bound for the covered mass, below which it is crossed. None for no bound.
        max_error: bound for the error, above which it is crossed. None for no bound.
        on_crossed: called with a `Crossing` for each call that crosses a bound. It runs in the thread that detects
            the crossing, which runs the model or reads the audit.
        fall_back: after a crossing the layer attends densely, until `resume`.
        confidence: confidence level of the intervals.
        window: number of latest audited calls of a layer that the estimates cover.
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
        sparse = [part for part in traces if part is not None and not _was_dense(part)]
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
            return [self._found(layer, state) for layer, state in sorted(self._layers.items())]

    def _found(self, layer: int, state: _State) -> LayerAudit:
        mass, error = self._estimates(torch.cat(list(state.samples), dim=1)) if state.samples else (None, None)
        return LayerAudit(layer, state.calls, state.audited, state.crossed, state.dense, mass, error)


def _was_dense(trace: AnyTrace) -> bool:
    """Whether the executor attended densely, as `AutoExecutor` does where that is little work."""
    return trace.output.lse is None and trace.output.visited is not None


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

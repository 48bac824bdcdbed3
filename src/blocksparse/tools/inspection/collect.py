"""Data of `blocksparse inspect`: presets in every layer of a dense prefill, as figures and maps of kept blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.transformers import attach
from blocksparse.inputs import MAX_HEAD_DIM, checked
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.layers.schedule import Schedule, base_model, logits_of
from blocksparse.select.block_mask import BlockMask
from blocksparse.tools.bench import executor_of
from blocksparse.tools.demo.model import Model
from blocksparse.tools.demo.watch import QKV, OwnAttention, never_sparse, watch

_QUERIES = 4  # of each row of pixels


@final
@frozen(eq=False)
class Figures:
    """Figures of one preset in one layer, `[Hq]` float64 on the CPU each."""

    density: Tensor  # work as a share of dense attention's
    covered_mass: Tensor  # share of the dense weights on visited pairs, mean over queries
    error: Tensor  # relative L1 distance of the output from dense attention's
    kl: Tensor  # of the sparse weights from the dense ones: minus the logarithm of a query's covered mass, mean


@final
@frozen(eq=False)
class Maps:
    """Attention maps of one layer, `[Hq, P, P]` fp32 on the CPU: rows of queries by columns of keys.

    Entries are shares of the weight of a query, mean over the queries of a row of pixels; those of a row sum to 1.
    """

    text: Tensor | None  # keys in the order of the text; None if slots have that order too
    slots: Tensor  # keys in the order of their slots
    kept: Tensor  # keys in the order of their slots: the share of the pairs that is visited, from 0 to 1
    dropped: Tensor  # as `slots`, only the weight on pairs that are not visited

    def halved(self) -> Maps:
        """The same maps with half as many pixels on each side."""

        def half(x: Tensor, summed: int) -> Tensor:
            even = pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2))
            return avg_pool2d(even, 2) * summed

        return Maps(
            None if self.text is None else half(self.text, 2),
            half(self.slots, 2),
            half(self.kept, 1),
            half(self.dropped, 2),
        )


def look(traces: Mapping[str, AnyTrace], shown: str, *, pixels: int) -> tuple[dict[str, Figures], Maps]:
    """Figures of every trace of one prompt in one layer, and the maps of the trace `shown`.

    The traces are of causal calls with the same q `[1, Hq, N, D]`, k and v. There are at most `pixels` rows of
    pixels. At most four queries of each are looked at; their dense attention is computed once, for all traces.
    """
    first = traces[shown]
    q, k, values, N = first.q, first.k, first.v.to(wide_dtype(first.v)), first.k.shape[2]
    tile = -(-N // pixels)
    sums = {name: torch.zeros(4, q.shape[1], dtype=torch.float64, device=q.device) for name in traces}
    order, looked, rows = _Order.of(first.visited), 0, []
    key = torch.arange(N, device=q.device)
    for start in range(0, N, tile):
        end = min(start + tile, N)
        count = min(_QUERIES, end - start)
        step = (end - start) / count
        query = torch.tensor([start + int((i + 0.5) * step) for i in range(count)], device=q.device)
        logits = products(q[:, :, query], k[:, :, :end]) * first.spec.scale  # [1, Hq, count, end]
        logits = logits.masked_fill(key[:end] > query.unsqueeze(-1), float("-inf"))
        weights, lse = logits.softmax(-1), logits.logsumexp(-1)
        dense = products(weights, values[:, :, :end].mT)
        for name, trace in traces.items():
            sums[name] += _compared(trace, query, dense, lse)
        rows.append(order.pooled(pad(weights[0], (0, N - end)), query, -(-N // tile)))
        looked += count
    text, slots, kept, dropped = (torch.stack(part, dim=1).cpu() for part in zip(*rows, strict=True))
    figures = {
        name: Figures(
            trace.density()[0].cpu(),
            sums[name][0].cpu() / looked,
            (sums[name][1] / sums[name][2]).cpu(),
            sums[name][3].cpu() / looked,
        )
        for name, trace in traces.items()
    }
    in_order = first.permutation.k_index is None
    return figures, Maps(None if in_order else text, slots, kept, dropped)


def _compared(trace: AnyTrace, query: Tensor, dense: Tensor, lse: Tensor) -> Tensor:
    """Sums over these queries, `[4, Hq]`: covered mass, `sum|o - o'|`, `sum|o'|`, and KL."""
    output = trace.output
    distance = (output.out[:, :, query].to(dense.dtype) - dense).abs().sum((-1, -2))[0]
    if trace.dense_because is not None:
        covered = torch.ones_like(lse)
    elif (visited := output.visited_lse) is None:  # an executor that does not say how much it covered
        covered = torch.full_like(lse, float("nan"))
    else:
        covered = (visited[:, :, query] - lse).clamp_max(0.0).exp()
    mass, kl = covered[0].sum(-1), -covered[0].log().sum(-1)
    if output.exact_lse is not None:  # weights that lie on no pair have no KL
        kl = torch.full_like(kl, float("nan"))
    return torch.stack([x.double() for x in (mass, distance, dense.abs().sum((-1, -2))[0], kl)])


@final
@frozen(eq=False)
class _Order:
    """Row of a query, and the key in each slot."""

    visited: BlockMask
    keep: Tensor  # [Hq, rows, cols] bool
    row: Tensor  # [1|Hq, N] int64, the row of blocks of each query

    @classmethod
    def of(cls, visited: BlockMask) -> _Order:
        grid, N = visited.grid, visited.grid.q_len
        position = grid.q_position[0].long()  # [1|Hq, places]
        place = torch.arange(position.shape[-1], device=position.device) // grid.q_block
        row = torch.zeros(position.shape[0], N + 1, dtype=torch.int64, device=position.device)
        row.scatter_(1, position.where(position >= 0, N), place.expand_as(position))
        return cls(visited, visited.per_query_head()[0], row[:, :N])

    def pooled(self, weights: Tensor, query: Tensor, pixels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One row of pixels `[Hq, pixels]` of each map, from the weights `[Hq, queries, N]` of these queries."""
        grid, heads = self.visited.grid, weights.shape[0]
        row = self.row[:, query].expand(heads, -1)  # [Hq, queries]
        group = torch.zeros_like(row) if grid.group_of_row is None else grid.group_of_row[row]
        position = grid.k_position[0]  # [1|Hkv|Hq, G, slots]
        owner = torch.arange(heads, device=row.device) * position.shape[0] // heads
        key = position[owner.unsqueeze(-1), group].long()  # [Hq, queries, slots]
        in_slots = weights.gather(-1, key.clamp_min(0)).where(key >= 0, 0.0)
        index = row.unsqueeze(-1).expand(-1, -1, self.keep.shape[-1])
        kept = self.keep.gather(1, index).repeat_interleave(grid.k_block, dim=-1) & (key >= 0)
        seen = (key >= 0) & (key <= query.unsqueeze(-1))
        pairs, visited = (_pool(x.to(weights.dtype), pixels) for x in (seen, kept & seen))
        share, dropped = visited / pairs.clamp_min(1e-9), in_slots.where(~kept, 0.0)
        return _pool(weights, pixels), _pool(in_slots, pixels), share, _pool(dropped, pixels)


def _pool(x: Tensor, pixels: int) -> Tensor:
    """Sums of `x` `[Hq, queries, slots]` over the slots of each pixel, mean over queries: `[Hq, pixels]`."""
    tile = -(-x.shape[-1] // pixels)
    summed: Tensor = pad(x, (0, tile * pixels - x.shape[-1])).unflatten(-1, (pixels, tile)).sum(-1).mean(1)
    return summed


STAGES = ("permute", "score", "select", "attend")
_PIXELS = 104  # what 270 heads have room for in the file
_CHUNK = 256  # positions whose logits are held at once


@final
@define(eq=False)
class Preset:
    """One preset on all layers."""

    name: str
    pipeline: AnyPipeline
    layers: dict[int, Figures] = field(factory=dict)
    seconds: dict[str, float] = field(factory=lambda: dict.fromkeys(STAGES, 0.0))  # of each stage, over layers
    executor: str = ""
    # Of next-token distributions, when every layer attends like this; in nats, mean over tokens.
    kl: float = float("nan")


@final
@frozen(eq=False)
class Findings:
    """Everything that the report shows."""

    presets: list[Preset]
    maps: dict[int, Maps]  # of the first preset, by layer
    dense_seconds: float  # of dense attention, over layers
    skipped: dict[int, str]  # layers that were not looked at, and why


@torch.inference_mode()
def collect(
    model: Model, ids: Tensor, pipelines: Mapping[str, AnyPipeline], *, begin: Callable[[str], None]
) -> Findings:
    """Read `ids` `[1, N]` densely, try every pipeline on the q, k, v of each layer, then read with each pipeline.

    Args:
        begin: called with what is being done.
    """
    presets = [Preset(name, pipeline) for name, pipeline in pipelines.items()]
    findings, dense_seconds, skipped = dict[int, Maps](), 0.0, dict[int, str]()

    def see(layer: int, qkv: QKV, options: dict[str, Any], _: OwnAttention) -> None:
        nonlocal dense_seconds
        begin(f"looking at layer {layer}")
        if (reason := _not_plain(qkv, options) or others.get(layer)) is not None:
            skipped[layer] = reason
            return
        q, k, v, spec = checked(*qkv, {"scale": options.get("scaling")})
        if not findings:  # first calls may compile, and that is no stage's time
            dense_attention(q, k, v, spec)
            for preset in presets:
                preset.executor = executor_of(preset.pipeline, preset.pipeline.trace(q, k, v, scale=spec.scale))
        start = _now(q.device)
        dense_attention(q, k, v, spec)
        dense_seconds += _now(q.device) - start
        traces = {preset.name: _trace(preset, q, k, v, spec.scale) for preset in presets}
        figures, findings[layer] = look(traces, presets[0].name, pixels=_PIXELS)
        for preset in presets:
            preset.layers[layer] = figures[preset.name]

    network, ids = model.network, ids.to(model.device)
    begin("looking for layers that can be sparse")
    others = never_sparse(network, ids)
    begin("reading with dense attention")
    with watch(network, on_qkv=see):
        dense = base_model(network)(ids, use_cache=False).last_hidden_state
    for number, preset in enumerate(presets if findings else (), 1):
        begin(f"reading with {preset.name} ({number} of {len(presets)})")
        schedule = Schedule(preset.pipeline, dense=sorted(skipped.keys() - {-1}))
        with attach(network, schedule, min_tokens=1, min_queries=1, min_window=None):
            preset.kl = _kl(network, dense, base_model(network)(ids, use_cache=False).last_hidden_state)
    return Findings(presets, findings, dense_seconds, skipped)


def _not_plain(qkv: QKV, options: dict[str, Any]) -> str | None:
    """Why presets would not run in this call of a model, or None."""
    q, k, v = qkv
    window = options.get("sliding_window")
    if q.shape[2] != k.shape[2]:
        return "it attends to other tokens than its own"
    if (widest := max(q.shape[3], v.shape[3])) > MAX_HEAD_DIM:
        return f"its head dim is {widest}, above {MAX_HEAD_DIM}"
    if window is not None and k.shape[2] > window:
        return f"it has a sliding window of {window} tokens"
    more = (name for name in ("softcap", "s_aux", "sinks", "position_bias") if options.get(name) is not None)
    return next((f"it has {name}" for name in more), None)


def _trace(preset: Preset, q: Tensor, k: Tensor, v: Tensor, scale: float) -> AnyTrace:
    """The trace of one call, whose stages are timed."""
    stages, start = iter(STAGES), _now(q.device)

    def done(_: object) -> None:
        nonlocal start
        end = _now(q.device)
        preset.seconds[next(stages)] += end - start
        start = end

    return preset.pipeline.trace(q, k, v, scale=scale, done=done)


def _now(device: torch.device) -> float:
    """Seconds of a clock, when all that runs on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _kl(network: Any, dense: Tensor, sparse: Tensor) -> float:
    """KL divergence of next-token distributions from those of `dense`, from hidden states `[1, N, C]`, in nats."""
    total = torch.zeros((), dtype=torch.float64, device=dense.device)
    for start in range(0, dense.shape[1], _CHUNK):
        parts = (x[0, start : start + _CHUNK] for x in (dense, sparse))
        right, other = (logits_of(network, part).log_softmax(-1) for part in parts)
        total += (right.exp() * (right - other)).sum(-1).double().sum()
    return float(total.clamp_min(0.0)) / dense.shape[1]  # no KL is below 0, but for rounding

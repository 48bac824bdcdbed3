"""Data of `blocksparse inspect`: presets applied to every layer of a dense prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from attrs import define, field, frozen
from torch import Tensor

from blocksparse.demo.methods import executor_of
from blocksparse.demo.model import Model
from blocksparse.demo.watch import QKV, Attention, watch
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.inputs import checked
from blocksparse.inspection.maps import Figures, Maps, look
from blocksparse.integrations.transformers import attach
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.layers.schedule import Schedule
from blocksparse.layers.text_model import base_model, logits_of

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

    def see(layer: int, qkv: QKV, options: dict[str, Any], _: Attention) -> None:
        nonlocal dense_seconds
        begin(f"looking at layer {layer}")
        if (reason := _not_plain(qkv, options)) is not None:
            skipped[layer] = reason
            return
        q, k, v, spec = checked(*qkv, {"scale": options.get("scaling")})
        if not findings:  # first calls may compile, and that is no stage's time
            dense_attention(q, k, v, spec)
            for preset in presets:
                preset.executor = executor_of(preset.pipeline, preset.pipeline.trace(q, k, v, scale=spec.scale))
        dense_seconds += _timed(lambda: dense_attention(q, k, v, spec), q.device)[1]
        traces = {preset.name: _trace(preset, q, k, v, spec.scale) for preset in presets}
        figures, findings[layer] = look(traces, presets[0].name, pixels=_PIXELS)
        for preset in presets:
            preset.layers[layer] = figures[preset.name]

    begin("reading with dense attention")
    network, ids = model.network, ids.to(model.device)
    with watch(network, on_qkv=see):
        dense = base_model(network)(ids, use_cache=False).last_hidden_state
    for number, preset in enumerate(presets, 1):
        begin(f"reading with {preset.name} ({number} of {len(presets)})")
        schedule = Schedule(preset.pipeline, dense=sorted(skipped))
        with attach(network, schedule, min_tokens=1, min_queries=1, min_window=None):
            preset.kl = _kl(network, dense, base_model(network)(ids, use_cache=False).last_hidden_state)
    return Findings(presets, findings, dense_seconds, skipped)


def _not_plain(qkv: QKV, options: dict[str, Any]) -> str | None:
    """Why presets would not run in this call of a model, or None."""
    q, k, _ = qkv
    window = options.get("sliding_window")
    if q.shape[2] != k.shape[2]:
        return "it attends to other tokens than its own"
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


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    start = _now(device)
    return call(), _now(device) - start


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
    return float(total) / dense.shape[1]

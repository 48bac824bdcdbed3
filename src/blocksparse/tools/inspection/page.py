"""The findings as one HTML file that needs nothing else: numbers as JSON, maps as compressed bytes in base64."""

from __future__ import annotations

import base64
import json
import zlib
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocksparse.tools.inspection.collect import STAGES, Findings, Maps, Preset

MOST_BYTES = 4_300_000  # of all maps; the file stays below 5 MB
_DECADES = 4.0  # what is fainter than this many powers of ten below the heaviest pixel looks like nothing
_LEVELS = 4  # steps of a byte that are told apart, so that bytes compress


def page(findings: Findings, **about: Any) -> str:
    """The HTML file; `about` says what was run, as the summary below does."""
    summary = {**numbers(findings, **about), **_encoded(findings.maps)}
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # In a script no "<" may stand, or a text with "</script>" would end it.
    data = json.dumps(summary, allow_nan=False).replace("<", "\\u003c")
    return template.replace("@@DATA@@", data)


def numbers(findings: Findings, **about: Any) -> dict[str, Any]:
    """Everything but the maps, for JSON. None stands for what an executor does not say."""
    return {
        **about,
        "dense_seconds": findings.dense_seconds,
        "skipped": {str(layer): why for layer, why in findings.skipped.items()},
        "presets": [_preset(preset) for preset in findings.presets],
    }


def table(findings: Findings) -> str:
    """One line per preset, means over layers and heads, in plain text."""
    width = max(len(preset.name) for preset in findings.presets)
    lines = [f"{'preset':<{width}}  density  coverage   error  next-token KL  attention"]
    for preset in findings.presets:
        means = (_mean(preset, name) for name in ("density", "covered_mass", "error"))
        density, covered, error = ("-" if isnan(x) else f"{x:.1%}" for x in means)
        seconds = f"{sum(preset.seconds.values()):.3g} s"
        lines.append(
            f"{preset.name:<{width}}  {density:>7}  {covered:>8}  {error:>6}  {preset.kl:>13.2e}  {seconds:>9}"
        )
    seconds = f"{findings.dense_seconds:.3g} s"
    lines.append(f"{'dense':<{width}}  {1:>7.1%}  {1:>8.1%}  {0:>6.1%}  {0:>13}  {seconds:>9}")
    return "\n".join(lines)


def _mean(preset: Preset, name: str) -> float:
    return float(torch.stack([getattr(figures, name).mean() for figures in preset.layers.values()]).mean())


def _preset(preset: Preset) -> dict[str, Any]:
    layers = []
    for layer, figures in preset.layers.items():
        named = ("density", "covered_mass", "error", "kl")
        heads = {name: [_number(x) for x in getattr(figures, name).tolist()] for name in named}
        means = {name: _number(float(getattr(figures, name).mean())) for name in named}
        layers.append({"layer": layer, "mean": means, "heads": heads})
    return {
        "name": preset.name,
        "pipeline": repr(preset.pipeline),
        "executor": preset.executor,
        "next_token_kl": _number(preset.kl),
        "seconds": {stage: preset.seconds[stage] for stage in STAGES},
        "layers": layers,
    }


def _number(x: float) -> float | None:
    """Six significant digits; None for NaN and infinity, which JSON lacks."""
    return float(f"{x:.6g}") if abs(x) < float("inf") else None


def _encoded(maps: dict[int, Maps]) -> dict[str, Any]:
    """The maps of every layer and head, with as many pixels as the file has room for."""
    while True:
        packed = {str(layer): _packed(of_layer) for layer, of_layer in maps.items()}
        pixels = next(iter(maps.values())).slots.shape[-1] if maps else 0
        if sum(len(head) for heads in packed.values() for head in heads) <= MOST_BYTES or pixels <= 8:
            in_text_order = {str(layer): of_layer.text is None for layer, of_layer in maps.items()}
            return {"pixels": pixels, "in_text_order": in_text_order, "maps": packed}
        maps = {layer: of_layer.halved() for layer, of_layer in maps.items()}


def _packed(maps: Maps) -> list[str]:
    """One string per head: zlib over the bytes of its maps, one after the other."""
    heads = []
    for head in range(maps.slots.shape[0]):
        heaviest = float(maps.slots[head].max())
        if maps.text is not None:
            heaviest = max(heaviest, float(maps.text[head].max()))
        parts = [_shade(maps.slots[head], heaviest), _stepped(maps.kept[head] * 255)]
        parts.append(_shade(maps.dropped[head], heaviest))
        if maps.text is not None:
            parts.append(_shade(maps.text[head], heaviest))
        raw = b"".join(part.numpy().tobytes() for part in parts)
        heads.append(base64.b64encode(zlib.compress(raw)).decode())
    return heads


def _shade(x: Tensor, heaviest: float) -> Tensor:
    """Bytes on a logarithmic scale: 255 is the heaviest pixel, 0 is nothing to be seen."""
    if heaviest <= 0:
        return torch.zeros_like(x, dtype=torch.uint8)
    return _stepped(255 * (1 + (x / heaviest).clamp_min(1e-30).log10() / _DECADES))


def _stepped(x: Tensor) -> Tensor:
    return (x / _LEVELS).round().mul(_LEVELS).clamp(0, 255).to(torch.uint8)

"""Error at equal density on a real model: `python -m benchmarks.matched_density`.

Every method is swept over its own threshold, layer by layer on the q, k, v of one dense pass; mean squared errors
are read off at equal densities. Makes the table of docs/evidence/s2o.md; runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from benchmarks.quality import (
    ALWAYS_SPARSE,
    QKV,
    TEXT_START,
    dense_outputs,
    first_tokens,
    layers_of,
    smollm2,
    with_yarn,
)
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import load

AnyPipeline = bs.Pipeline[Any, Any, Any]
Curve = list[tuple[float, float]]
"""Density and mean squared error, means over layers."""

SWEEPS: dict[str, tuple[Callable[..., AnyPipeline], tuple[float, ...]]] = {
    "s2o": (bs.s2o, (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)),
    "pbs_attn": (bs.pbs_attn, (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)),
    "xattention": (bs.xattention, (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)),
    "mean_pooling": (bs.mean_pooling, (0.6, 0.8, 0.9, 0.95, 0.98, 0.99)),
}
DENSITIES = (0.1, 0.15, 0.2, 0.3, 0.4)
TRAINED = 8192  # tokens; longer texts are read with YaRN


@torch.inference_mode()
def curve(
    preset: Callable[..., AnyPipeline],
    values: Iterable[float],
    block: int,
    layers: dict[int, QKV],
    dense: dict[int, Tensor],
) -> Curve:
    """One point for each value of the preset's first parameter, by rising density."""
    points = []
    for value in values:
        pipeline = preset(value, block=block)
        if isinstance(pipeline.executor, bs.AutoExecutor):
            pipeline = evolve(pipeline, executor=ALWAYS_SPARSE)
        rows = []
        for layer, (q, k, v) in layers.items():
            trace = pipeline.trace(q, k, v)
            error = (trace.output.out.float() - dense[layer]).square().mean()
            rows.append((float(trace.density().mean()), float(error)))
        points.append((statistics.fmean(x for x, _ in rows), statistics.fmean(x for _, x in rows)))
    return sorted(points)


def read_off(points: Curve, density: float) -> float | None:
    """Error at a density between two points, straight in its logarithm; None outside of the curve."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= density <= x1:
            part = (density - x0) / (x1 - x0) if x1 > x0 else 0.0
            return math.exp((1 - part) * math.log(y0) + part * math.log(y1))
    return None


def table(curves: dict[str, Curve]) -> str:
    """Errors at equal densities, and how many times the best other method's error S2O's is below it."""
    lines = [f"| density | {' | '.join(curves)} | best other / s2o |", "|" + "---|" * (len(curves) + 2)]
    for density in DENSITIES:
        errors = {name: read_off(points, density) for name, points in curves.items()}
        others = [x for name, x in errors.items() if name != "s2o" and x is not None]
        mine = errors["s2o"]
        ratio = f"{min(others) / mine:.1f}" if others and mine else "-"
        cells = ["-" if x is None else f"{x:.1e}" for x in errors.values()]
        lines.append(f"| {density:.2f} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--every", type=int, default=5, help="take one of so many layers")
    parser.add_argument("--model", type=Path, help="a folder with a transformers model; SmolLM2 if not given")
    parser.add_argument("--out", type=Path, default=Path("matched-density.json"))
    options = parser.parse_args()

    folder = options.model or smollm2()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, dict[str, Curve]] = {}
    for tokens in options.tokens:
        model = load(folder, device=device) if tokens <= TRAINED else with_yarn(folder, device)
        content = options.text.read_text(encoding="utf-8")[TEXT_START:]
        every = layers_of(model, first_tokens(model, content, tokens))
        layers = {i: qkv for i, qkv in every.items() if i % options.every == 2 % options.every}
        dense = dense_outputs(layers)
        curves = results[f"{tokens} tokens"] = {}
        for name, (preset, values) in SWEEPS.items():
            curves[name] = curve(preset, values, options.block, layers, dense)
            print(tokens, name, *(f"{x:.3f}:{y:.1e}" for x, y in curves[name]), flush=True)
        print(f"\n{tokens} tokens, layers {', '.join(map(str, layers))}\n\n{table(curves)}\n", flush=True)
        options.out.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()

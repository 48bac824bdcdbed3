"""Time that the host takes for a call, of kept and of new objects: `python -m benchmarks.host_time [--json FILE]`.

It asks nothing of `blocksparse` but presets and calls, so that it measures older versions too, from another folder
in PYTHONPATH. Times of two versions are comparable where they took turns on one machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, fields_dict
from torch import Tensor

import blocksparse as bs
from blocksparse.presets import every_preset
from blocksparse.tools.bench import structured

Make = Callable[[], Any]
"""Gives a pipeline, new or kept."""

LAYERS = 30
MASSES = (0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
MIXED = ("pbs_attn", "mean_pooling")


def host_ms(
    passes: Mapping[str, Sequence[Make]], qkv: tuple[Tensor, Tensor, Tensor], *, repeats: int
) -> dict[str, float]:
    """Milliseconds until a call returns, its pipeline made, by a GPU with nothing else to do; mean of a pass.

    A pass calls its pipelines in order. The passes take turns, since the speed of a host changes; of the times
    of one the median counts.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, makes in passes.items():
            taken = 0.0
            for make in makes:
                torch.cuda.synchronize()
                start = time.perf_counter()
                make()(*qkv)
                taken += time.perf_counter() - start
            times[name].append(taken / len(makes) * 1e3)
    torch.cuda.synchronize()
    return {name: statistics.median(its) for name, its in times.items()}


def passes(dense_below: float) -> dict[str, list[Make]]:
    """One kept object, new ones, and plans of layers; also without repeating, if this version can be asked to."""

    def made(name: str, *given: float) -> Any:
        return every_preset[name](*given, executor=bs.AutoExecutor(dense_below=dense_below))

    masses = [MASSES[layer % len(MASSES)] for layer in range(LAYERS)]
    found: dict[str, list[Make]] = {
        "kept": [_kept(made("pbs_attn"))] * LAYERS,
        "new": [partial(made, "pbs_attn")] * LAYERS,
        "of new stages": [partial(_of_stages, dense_below)] * LAYERS,
        "plan": [_kept(made("pbs_attn", mass)) for mass in masses],
        "mixed plan": [_kept(made(MIXED[layer % 2], mass)) for layer, mass in enumerate(masses)],
        "kept, mean_pooling": [_kept(made("mean_pooling"))] * LAYERS,
    }
    if "replay" in fields_dict(bs.Pipeline):
        for name, makes in list(found.items()):
            found[f"{name}; not replayed"] = [partial(_without_replay, make) for make in makes]
            if name not in ("new", "of new stages"):  # made once, as the plan is
                found[f"{name}; not replayed"] = [_kept(_without_replay(make)) for make in makes]
    return found


def _kept(pipeline: Any) -> Make:
    return lambda: pipeline


def _of_stages(dense_below: float) -> Any:
    """`pbs_attn()` without its preset, which gives one object for equal arguments."""
    order = bs.SegmentKeySort(256, last_q=128, per_query_head=False, causal_last_q=True)
    selector = bs.TopCdf(0.9) | bs.Sink(1)
    return bs.Pipeline(order, bs.MeanPoolScorer(128), selector, bs.AutoExecutor(dense_below=dense_below))


def _without_replay(make: Make) -> Any:
    return evolve(make(), replay=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, nargs=2, default=(4, 1), metavar=("Hq", "Hkv"))
    parser.add_argument(
        "--dense-below", type=float, nargs="+", default=(0.0, 9e11), help="as of AutoExecutor; 0 for sparse calls"
    )
    parser.add_argument("--repeats", type=int, default=10, help="passes of 30 calls each")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    Hq, Hkv = arguments.heads
    qkv = structured(arguments.tokens, Hq, Hkv, 128, device, torch.bfloat16)
    by_limit: dict[str, dict[str, float]] = {}
    for dense_below in arguments.dense_below:
        with torch.inference_mode():
            found = passes(dense_below)
            host_ms(found, qkv, repeats=3)  # compiles, captures
            times = by_limit[f"{dense_below:g}"] = host_ms(found, qkv, repeats=arguments.repeats)
        print(f"dense below {dense_below:g}")
        for name, ms in times.items():
            print(f"{name:32s} {ms:.3f} ms   {ms / times['kept']:.2f} x kept", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(by_limit, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

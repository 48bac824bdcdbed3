"""Whether two versions do the same on a CPU: `python -m benchmarks.same_bits record FILE`, with each.

Then `python -m benchmarks.same_bits compare OLD NEW`. It asks nothing of `blocksparse` but presets and traces, so
that it runs with older versions too, from another folder in PYTHONPATH. With `--plain` no compiler is found, and
plain torch computes everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.presets import every_preset

# Arguments by which presets are sparse at these sizes, and their defaults.
PRESETS: dict[str, list[dict[str, Any]]] = {
    "auto": [{}, {"quality": "fast"}],
    "pbs_attn": [{}, {"mass": 0.7, "per_query_head": True}, {"as_released": True}],
    "pbs_attn_plus": [{}, {"mass": 0.7, "stride": 16}],
    "mean_pooling": [{}, {"mass": 0.6, "block": 64}, {"as_released": True}],
    "bfla": [{}, {"block": 128, "g": 32, "mass": 0.8}],
    "s2o": [{}, {"coarse": False}, {"prefix": None}],
    "sparge": [{}, {"share": 0.2}, {"mass": 0.5, "theta": 0.3, "as_released": True}],
    "xattention": [{}, {"mass": 0.6, "stride": 16}, {"as_released": True}],
    "flex_prefill": [{"min_budget": 128}, {"mass": 0.8, "tau": 10.0, "min_budget": 128}],
    "minference": [{"vertical": 60, "slash": 100}, {"vertical": 60, "slash": 100, "as_released": True}],
    "a_shape": [{"sink": 64, "local": 200}],
    "tri_shape": [{"sink": 64, "local": 200, "last": 100}],
}
# (B, Hq, Hkv, M, N, D), and what a layer asks for.
CALLS: list[tuple[tuple[int, int, int, int, int, int], dict[str, Any]]] = [
    ((1, 4, 2, 1024, 1024, 64), {}),
    ((2, 4, 1, 777, 777, 40), {}),
    ((1, 4, 2, 300, 1300, 64), {}),
    ((1, 4, 4, 2048, 2048, 128), {}),
    ((1, 4, 2, 1024, 1024, 64), {"causal": False}),
    ((1, 2, 1, 500, 900, 64), {"causal": False}),
    ((1, 4, 2, 1500, 1500, 64), {"window": 500}),
    ((1, 4, 2, 400, 1500, 64), {"window": 500}),
    ((1, 4, 2, 1024, 1024, 64), {"softcap": 20.0, "sinks": [0.5, -1.0, 2.0, 0.0]}),
    ((1, 4, 2, 1024, 1024, 64), {"scale": -0.2}),
]
CHOICE = ("blocks", "keep", "q_index", "k_index", "density")


def inputs(sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """`q` `[B, Hq, M, D]`, `k` and `v` `[B, Hkv, N, D]`: stretches of 64 tokens with one of nine topics each."""
    B, Hq, Hkv, M, N, D = sizes
    generator = torch.Generator().manual_seed(B + 7 * Hq + 31 * Hkv + 101 * M + 1009 * N + 7919 * D)
    topics = torch.randn(9, D, generator=generator)

    def drawn(H: int, tokens: int) -> Tensor:
        topic = torch.randint(9, (B, H, tokens // 64 + 1), generator=generator).repeat_interleave(64, -1)
        return topics[topic[:, :, :tokens]] + torch.randn(B, H, tokens, D, generator=generator)

    return [x.to(dtype) for x in (drawn(Hq, M), drawn(Hkv, N), torch.randn(B, Hkv, N, D, generator=generator))]


def cases() -> Iterator[tuple[str, dict[str, Any], tuple[int, int, int, int, int, int], dict[str, Any], str]]:
    for name, many in PRESETS.items():
        for arguments in many:
            for sizes, asked in CALLS:
                for dtype in ("float32", "bfloat16", "float16"):
                    if dtype != "float16" or (not asked and sizes[3] < 2048):
                        yield name, arguments, sizes, asked, dtype


def digest(x: Tensor | None) -> str | None:
    if x is None:
        return None
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def recorded(pipeline: Any, qkv: list[Tensor], asked: dict[str, Any]) -> dict[str, Any]:
    """What a call chose and gave, or why it was refused."""
    try:
        if not hasattr(bs, "AttentionSpec"):  # older versions have what a layer asks for in the pipeline
            asked = dict(asked)
            pipeline = pipeline.in_window(asked.pop("window", None))
            if "softcap" in asked:
                logits: Any = vars(bs)["Logits"](softcap=asked.pop("softcap"), sinks=asked.pop("sinks"))
                pipeline = pipeline.with_logits(logits)
        trace = pipeline.trace(*qkv, **asked)
        call = pipeline(*qkv, **asked)
    except (TypeError, ValueError) as error:
        return {"refused": type(error).__name__}
    grid, order = trace.mask.grid, trace.permutation
    return {
        "blocks": [grid.q_block, grid.k_block],
        "keep": digest(trace.mask.keep),
        "q_index": digest(order.q_index),
        "k_index": digest(order.k_index),
        "density": digest(trace.density()),
        "scores": digest(trace.scores.values),
        "out": digest(trace.output.out),
        "lse": digest(trace.output.lse),
        "call": digest(call),
    }


def record(path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, arguments, sizes, asked, dtype in cases():
        executors = {"reference": bs.ReferenceExecutor(), "auto": bs.AutoExecutor(dense_below=0)}
        if name == "s2o":
            executors["auto"] = bs.GatherExecutor()
        qkv = inputs(sizes, getattr(torch, dtype))
        for which, executor in executors.items():
            pipeline = every_preset[name](**arguments, executor=executor)
            found[f"{name} {arguments} {sizes} {asked} {dtype} {which}"] = recorded(pipeline, qkv, asked)
    path.write_text(json.dumps(found, indent=0), encoding="utf-8")


def compare(old: Path, new: Path) -> dict[str, dict[str, int]]:
    """By preset: calls, and of how many the choice, and everything, is the same; of how many outputs are."""
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (old, new))
    found: dict[str, dict[str, int]] = {}
    for case in before:
        row = found.setdefault(case.split()[0], dict.fromkeys(("calls", "refused", "choice", "outputs", "all"), 0))
        mine, its = before[case], after[case]
        row["calls"] += 1
        row["refused"] += "refused" in mine and mine == its
        row["choice"] += "refused" not in mine and all(mine[x] == its.get(x) for x in CHOICE)
        row["outputs"] += "refused" not in mine and all(mine[x] == its.get(x) for x in ("out", "lse", "call"))
        row["all"] += mine == its
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--plain", action="store_true", help="without compiled kernels")
    both = commands.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        with TemporaryDirectory() as empty:
            if asked.plain:
                os.environ.update(PATH=empty, CXX="", XDG_CACHE_HOME=empty)
            record(asked.file)
        return
    for name, row in compare(asked.old, asked.new).items():
        print(f"{name:14s}", *(f"{value:4d} {what}" for what, value in row.items()))


if __name__ == "__main__":
    main()

"""What it costs that blocks which are not kept take part by their means: `python -m benchmarks.mean_correction`.

Each call attends to the same mask with and without means, in turns, after a check against plain torch; then its
kernels are profiled one by one. It needs a GPU; `--calls toy` tries it on a CPU, without the profile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import blocksparse as bs
from benchmarks.gpu_work import work_of
from benchmarks.inputs import QKV
from benchmarks.run import environment
from benchmarks.timing import check_near, medians
from benchmarks.video import plain_means, with_means

AnyPipeline = bs.Pipeline[Any, Any, Any]
SHARE = 0.25  # of a row's blocks, that is kept
OWN = ("_pool", "_take", "_add")  # the kernels of the mean correction, by the ends of their names
REPEATS = 20  # of calls that are profiled, after a cold one


@frozen
class Call:
    """Self-attention of `tokens` tokens; heads have dimension 128, and 16 in a toy."""

    tokens: int
    heads: int
    kv_heads: int
    block: int
    causal: bool
    head_dim: int = 128

    def qkv(self, device: torch.device, dtype: torch.dtype) -> QKV:
        q, k, v = (
            torch.randn(1, heads, self.tokens, self.head_dim, device=device, dtype=dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return q, k, v

    @property
    def pipeline(self) -> AnyPipeline:
        return bs.Pipeline(
            bs.Identity(), bs.MeanPoolScorer(self.block), bs.TopK(share=SHARE), bs.AutoExecutor(dense_below=0)
        )


CALLS = {
    "75,776 tokens, 7 heads, blocks of 64": Call(75776, 7, 7, 64, False),
    "75,776 tokens, 7 heads, blocks of 128": Call(75776, 7, 7, 128, False),
    "32,768 causal tokens, 32 heads": Call(32768, 32, 32, 128, True),
    "32,768 causal tokens, 32 heads over 8": Call(32768, 32, 8, 128, True),
    "131,072 causal tokens, 32 heads over 8": Call(131072, 32, 8, 128, True),
    "toy": Call(300, 2, 1, 16, True, 16),
}


def measure(call: Call, device: torch.device, dtype: torch.dtype, budget_ms: float) -> dict[str, Any]:
    """Milliseconds with and without means, and of each kernel of the mean correction."""
    q, k, v = call.qkv(device, dtype)
    pipeline = call.pipeline
    means = with_means(pipeline)
    choice = pipeline.choose(q, k, causal=call.causal)
    check_near(means.attend(q, k, v, choice).out, plain_means(pipeline, q, k, v, choice), tolerance=1e-2)
    calls: dict[str, Callable[[], object]] = {
        "attend": partial(pipeline.attend, q, k, v, choice),
        "means": partial(means.attend, q, k, v, choice),
    }
    figures = medians(calls, device=device, budget_ms=budget_ms)
    found: dict[str, Any] = {name: figure.as_row() for name, figure in figures.items()}
    if device.type == "cuda":
        kernels = work_of(calls["means"], device, repeats=REPEATS).kernels
        found["kernels"] = {name: ms for name, (_, ms) in kernels.items() if name.endswith(OWN)}
    return found


def line(name: str, row: dict[str, Any]) -> str:
    attend, means = row["attend"]["ms"], row["means"]["ms"]
    kernels = " ".join(f"{kernel} {ms:.3f}" for kernel, ms in row.get("kernels", {}).items())
    return f"{name:<40} attending {attend:8.3f}  with means {means:8.3f}  {means / attend:.3f}  {kernels}"


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    real = [name for name in CALLS if name != "toy"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=real if device.type == "cuda" else ["toy"])
    parser.add_argument("--budget-ms", type=float, default=400, help="for the repeats of each call")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {"environment": environment(device), "calls": {}}
    for name in options.calls:
        torch.manual_seed(0)
        found["calls"][name] = measure(CALLS[name], device, dtype, options.budget_ms)
        print(line(name, found["calls"][name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with torch.no_grad():
        main()

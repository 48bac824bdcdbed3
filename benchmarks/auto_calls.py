"""`auto` and others on structured inputs, beside dense attention: `python -m benchmarks.auto_calls [--json FILE]`.

Of each method at each length: density, milliseconds of choosing, of attending to what is chosen and of the whole
call, how many times as long dense attention takes, the launches of a call (in the file each with its time), and
how many blocks fp32 inputs choose otherwise. An output is checked against float64 before it is timed. The file
grows row by row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import blocksparse as bs
from benchmarks.inputs import everything, structured
from benchmarks.peers import DENSE
from benchmarks.report import Row
from benchmarks.run import environment
from benchmarks.timing import Candidate, attempt, check, measure, medians, ready, release

LENGTHS = (131072, 32768, 8192, 16384, 65536)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BAND = bs.Band(128)

Pipelines = Mapping[str, Callable[[], Any]]
"""How to make each method."""


def methods(executor: bs.Executor[Any, Any]) -> Pipelines:
    """All of them, with kernels at any length but `auto`, which says itself where it is dense."""

    def banded(pipeline: Any) -> Any:
        return evolve(pipeline, selector=pipeline.selector | BAND)

    def sums(mass: float, stride: int) -> Any:
        return banded(bs.xattention(mass, stride=stride, block=128, pattern="sum", executor=executor))

    def pooled(mass: float) -> Any:
        return banded(bs.mean_pooling(mass, block=128, executor=executor))

    return {
        "auto": bs.auto,
        "auto, careful": partial(bs.auto, "careful"),
        "auto, fast": partial(bs.auto, "fast"),
        "sums of cells, stride 16": partial(sums, 0.9, 16),
        "sums of cells, stride 8": partial(sums, 0.9, 8),
        "mean pooling": partial(pooled, 0.9),
        "mean pooling, mass .97": partial(pooled, 0.97),
        "antidiagonals, stride 8, blocks of 64": lambda: banded(
            bs.xattention(0.9, stride=8, block=64, executor=executor)
        ),
        "pbs_attn": partial(bs.pbs_attn, executor=executor),
        "flex_prefill": partial(bs.flex_prefill, executor=executor),
        "flex_prefill, blocks of 64": partial(bs.flex_prefill, block=64, executor=executor),
        "minference": partial(bs.minference, executor=executor),
        "minference(300, 500)": partial(bs.minference, 300, 500, executor=executor),
    }


def rows(
    N: int, made: Pipelines, device: torch.device, *, heads: tuple[int, int], budget_ms: float
) -> Iterator[Row]:
    """Dense kernels, then every method, at one length; all calls take turns."""
    release(device)
    torch.manual_seed(N)
    q, k, v = structured(N, *heads, HEAD_DIM, device, torch.bfloat16)
    whole = everything(q, k)
    of_dense = {
        name: Candidate(partial(DENSE[name], q, k, v), partial(check, q=q, k=k, v=v, mask=whole))
        for name in ("cuDNN dense", "FA2 dense")
    }
    candidates, parts, found = dict(of_dense), dict[str, Callable[[], object]](), dict[str, Row]()
    for name, make in made.items():
        pipeline = make()
        found[name] = attempt({}, partial(_about, pipeline, q, k, v))
        if "why" in found[name]:
            continue
        choice = pipeline.choose(q, k)
        candidates[name] = Candidate(
            ready(partial(pipeline, q, k, v)),
            partial(check, q=q, k=k, v=v, mask=whole if found[name]["density"] == 1 else choice.mask),
        )
        parts[f"{name}; choosing"] = partial(pipeline.choose, q, k)
        parts[f"{name}; attending"] = partial(pipeline.attend, q, k, v, choice)
    figures = measure(candidates, device=device, budget_ms=budget_ms)
    of_parts = medians(parts, device=device, budget_ms=budget_ms / 2)
    dense = min((ms for x in of_dense if (ms := figures[x].ms) is not None), default=None)
    for name, figure in figures.items():
        row = {"N": N, "method": name, **found.get(name, {"density": 1.0}), **figure.as_row()}
        for part in ("choosing", "attending"):
            if (x := of_parts.get(f"{name}; {part}")) is not None:
                row[part] = x.ms
        if dense is not None and figure.ms:
            row["times dense"] = dense / figure.ms
        yield row
    yield from ({"N": N, "method": name, **row} for name, row in found.items() if name not in figures)


def _about(pipeline: Any, q: Tensor, k: Tensor, v: Tensor) -> Row:
    """What the call keeps, what it launches, and what fp32 would keep."""
    mask = pipeline.trace(q, k, v).visited
    exact = pipeline.choose(q.float(), k.float()).mask
    chosen = pipeline.choose(q, k).mask
    found: Row = {"density": float(mask.density().mean())}
    if q.is_cuda:
        each = launches(partial(pipeline, q, k, v))
        found |= {"launches": len(each), "each launch, us": each}
    blocks = chosen.grid.visible.expand(chosen.keep.shape)
    return found | {"otherwise in fp32": int((chosen.keep != exact.keep).sum()), "blocks": int(blocks.sum())}


def launches(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Kernels, copies and fills that a call puts on a GPU, once it is known, in order: names and microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = (event for event in found.events() or () if event.device_type == DeviceType.CUDA)
    in_order = sorted(events, key=lambda event: event.time_range.start)
    return [(event.name[:40], event.time_range.elapsed_us()) for event in in_order]


def line(row: Row) -> str:
    """One line for a row."""
    figures = " ".join(
        f"{name} {x:.3f}" if isinstance(x, float) else f"{name} {x}"
        for name, x in row.items()
        if name not in ("N", "method", "each launch, us")
    )
    return f"{row['N']:7} {row['method']:40} {figures}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--heads", type=int, nargs=2, default=(HEADS, KV_HEADS), metavar=("Hq", "Hkv"))
    parser.add_argument("--methods", nargs="*", help="only these, by their names in the table")
    parser.add_argument("--budget", type=float, default=80.0, help="milliseconds for a call's time")
    parser.add_argument("--json", type=Path, default=Path("auto-calls.json"))
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = methods(bs.AutoExecutor(dense_below=0))
    if unknown := set(options.methods or ()) - set(made):
        parser.error(f"no such methods: {', '.join(sorted(unknown))}; there are {', '.join(made)}")
    if options.methods is not None:
        made = {name: made[name] for name in options.methods}
    found: dict[str, Any] = {"environment": environment(device), "rows": []}
    print(found["environment"], flush=True)
    with torch.inference_mode():
        for N in options.tokens:
            for row in rows(N, made, device, heads=tuple(options.heads), budget_ms=options.budget):
                found["rows"].append(row)
                print(line(row), flush=True)
                options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

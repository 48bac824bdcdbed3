"""Chunks of a prompt from the pages of a cache, read in place and gathered first.

    python -m benchmarks.paged [--json FILE]

Pooling all keys anew, in place, is what a history of pooled keys could save of a chunk at most. Also two prompts
in two calls, beside one prompt with as many queries: what one launch for both could give. Times are of a GPU at
work without a pause; the host's are until a call returns, by a GPU with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.tools.bench import structured

HEADS, KV_HEADS, D = 32, 8, 128
CUDA = torch.device("cuda")
AT_WORK = 8  # calls that are launched behind one another
PIPELINES: dict[str, Any] = {"sparge": bs.sparge(share=0.1), "auto": bs.auto()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--page", type=int, nargs="*", default=[16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = []
    print(
        "preset, tokens, chunk, page, memory: gathered ms, in place ms, gather alone ms; host gathered, in place"
    )
    for N in asked.tokens:
        q, k, v = structured(N, HEADS, KV_HEADS, D, device=CUDA, dtype=torch.bfloat16)
        for page in asked.page:
            for tokens_first in (True, False):
                for name, pipeline in PIPELINES.items():
                    for chunk in asked.chunks:
                        row = case(name, pipeline, q[:, :, -chunk:], k, v, page, tokens_first, asked.repeats)
                        rows.append(row)
                        print(*(f"{x:.4f}" if isinstance(x, float) else x for x in row.values()), flush=True)
    for N, chunk in ((32768, 4096), (32768, 1024), (16384, 4096)):
        row = two_prompts(PIPELINES["sparge"], N, chunk, asked.repeats)
        rows.append(row)
        print(*(f"{x:.4f}" if isinstance(x, float) else x for x in row.values()), flush=True)
    if asked.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": [HEADS, KV_HEADS, D]}
        asked.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


def always(pipeline: Any) -> Any:
    """The same, never dense."""
    return evolve(pipeline, executor=bs.AutoExecutor(dense_below=0))


def case(
    name: str, pipeline: Any, q: Tensor, k: Tensor, v: Tensor, page: int, tokens_first: bool, repeats: int
) -> dict[str, Any]:
    pipeline, N = always(pipeline), k.shape[2]
    in_pages = bs.PagedPipeline(pipeline)
    pages = N // page
    cache = torch.empty((pages, page, KV_HEADS, 2 * D), dtype=k.dtype, device="cuda").transpose(1, 2)
    if not tokens_first:
        cache = torch.empty((pages, KV_HEADS, page, 2 * D), dtype=k.dtype, device="cuda")
    order = torch.randperm(pages, device="cuda")
    cache[order] = torch.cat((k, v), dim=3)[0].unflatten(1, (pages, page)).transpose(0, 1)
    table = bs.PageTable(order.to(torch.int32)[None], [N], page_size=page)
    keys, values = cache.split(D, dim=3)
    room, out = torch.empty(2 * k.numel(), dtype=k.dtype, device="cuda"), torch.empty_like(q)

    def gathered() -> Any:
        return pipeline(q, *table.gather_one(0, keys, values, room), out=out)

    def in_place() -> Any:
        return in_pages(q, table.in_place(0, keys, values), out=out)

    def gather() -> Any:
        return table.gather_one(0, keys, values, room)

    kv = table.in_place(0, keys, values)

    def pool() -> Any:
        return block_mean(kv.keys, 64, index=kv.key_slots)

    expected = gathered().clone()
    if not torch.equal(in_place(), expected):
        raise SystemExit(f"{name}, {N} tokens, pages of {page}: in place has other bits than gathered")
    ms = gpu_ms({"gathered": gathered, "in place": in_place, "gather": gather, "pool": pool}, repeats)
    host = host_ms({"host gathered": gathered, "host in place": in_place}, repeats)
    memory = "tokens first" if tokens_first else "heads first"
    return {"preset": name, "tokens": N, "chunk": q.shape[2], "page": page, "memory": memory, **ms, **host}


def two_prompts(pipeline: Any, N: int, chunk: int, repeats: int) -> dict[str, Any]:
    """Two chunks of prompts of N tokens in two calls, and one chunk of as many queries of one such prompt."""
    pipeline = always(pipeline)
    prompts = [structured(N, HEADS, KV_HEADS, D, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]

    def apart() -> None:
        for q, k, v in prompts:
            pipeline(q[:, :, -chunk:], k, v)

    def as_one() -> None:
        q, k, v = prompts[0]
        pipeline(q[:, :, -2 * chunk :], k, v)

    ms = gpu_ms({"two calls": apart, "one call of as many queries": as_one}, repeats)
    return {"two prompts of": N, "chunk": chunk, **ms, **host_ms({"host two": apart, "host one": as_one}, repeats)}


def gpu_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of a call among others of its kind, in turns, medians."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 3):  # the first calls compile kernels, and are recorded
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # so that the host is ahead of the GPU
            begin.record()
            for _ in range(AT_WORK):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / AT_WORK)
    return {name: statistics.median(its[3:]) for name, its in times.items()}


def host_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return {name: statistics.median(its) for name, its in times.items()}


if __name__ == "__main__":
    main()

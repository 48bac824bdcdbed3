"""One call of attention over the GPUs of a host, against one of them.

    torchrun --nproc-per-node 2 -m benchmarks.distributed --out results    # one GPU and two
    python -m benchmarks.distributed --out results                         # one GPU alone

It runs on CPUs through gloo, too: `--tokens 2048 --block 16`. Every scheme must give what one process gives before
it is timed. The process ends by itself after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import blocksparse as bs
from benchmarks.distributed_report import table
from benchmarks.distributed_stages import Spans, only_communication, only_masks, timed
from benchmarks.inputs import QKV, structured
from benchmarks.timing import WrongOutputError, reason, relative_l1
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.distributed.scheme import Scheme
from blocksparse.layers.head_groups import AnyPipeline

Row = dict[str, Any]
Attend = Callable[..., Tensor]

SCHEMES = ("ulysses", "ulysses, balanced", "all-gather", "ring")


@frozen
class Shape:
    """Heads of one layer, and the pipeline of which density is asked."""

    Hq: int
    Hkv: int
    D: int
    block: int
    density: float
    dtype: torch.dtype

    def inputs(self, N: int, device: torch.device) -> QKV:
        torch.manual_seed(0)  # all ranks draw the same
        return structured(N, self.Hq, self.Hkv, self.D, device, self.dtype)

    def pipeline(self, mass: float, device: torch.device) -> AnyPipeline:
        executor = bs.TritonExecutor() if device.type == "cuda" else bs.CpuExecutor()
        return bs.pbs_attn(mass, block=self.block, S=2 * self.block, executor=executor)

    def bytes_sent(self, scheme: str, N: int, ranks: int) -> int:
        """What a rank sends, in bytes."""
        own, size = N // ranks, torch.finfo(self.dtype).bits // 8
        if scheme.startswith("ulysses"):
            kv = self.Hkv * max(1, ranks // self.Hkv)
            return own * (2 * self.Hq + 2 * kv) * self.D * size * (ranks - 1) // ranks
        return own * (3 if scheme == "ring" else 2) * self.Hkv * self.D * size * (ranks - 1)


@frozen
class Here:
    """This process among the others."""

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, limit: float) -> Here:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if not dist.is_torchelastic_launched():
            return cls(0, 1, torch.device(kind), None)
        device = torch.device(kind, dist.get_node_local_rank()) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        options: Row = {"device_id": device} if kind == "cuda" else {}
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=limit), **options)
        ranks = dist.get_world_size()
        return cls(dist.get_rank(), ranks, device, init_device_mesh(kind, (ranks,), mesh_dim_names=("ranks",)))

    def scheme(self, name: str, pipeline: AnyPipeline, density: Tensor) -> Scheme:
        assert self.mesh is not None
        if name.startswith("ulysses"):
            return Ulysses(pipeline, self.mesh, "ranks", density=density if "balanced" in name else None)
        kind: type[AllGatherKV] | type[Ring] = AllGatherKV if name == "all-gather" else Ring
        return kind(pipeline, self.mesh, "ranks", head_tail=True)

    def wait(self, *, together: bool) -> None:
        """Let the device, and with `together` all ranks, come to an end of what they do."""
        if together and self.mesh is not None:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def worst(self, x: float, *, together: bool) -> float:
        """The greatest `x` of all ranks."""
        if not together or self.mesh is None:
            return x
        tensor = torch.tensor([x], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def milliseconds(self, call: Callable[[], object], budget_ms: float, *, together: bool) -> float:
        """The median over repeats of the time from a common start until the last rank has ended."""
        times: list[float] = []
        while len(times) < 3 or (sum(times) < budget_ms and len(times) < 20):
            self.wait(together=together)
            start = time.perf_counter()
            call()
            self.wait(together=False)
            times.append(self.worst((time.perf_counter() - start) * 1e3, together=together))
        return statistics.median(times)

    def peak(self, call: Callable[[], object], inputs: Sequence[Tensor], *, together: bool) -> int | None:
        """The most memory of a call, its inputs included, on the rank with the most; None where nobody counts."""
        if self.device.type != "cuda":
            return None
        self.wait(together=together)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.wait(together=False)
        own = torch.cuda.max_memory_allocated(self.device) - before + sum(x.nbytes for x in inputs)
        return int(self.worst(own, together=together))

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def mass_for(shape: Shape, qkv: QKV, device: torch.device) -> float:
    """The threshold at which the pipeline keeps about the density that is asked for; all ranks find the same."""
    low, high = 0.3, 0.999
    q, k, _ = qkv
    for _ in range(7):
        mass = (low + high) / 2
        pipeline = shape.pipeline(mass, device)
        kept = float(masks_density(pipeline, q, k).mean())
        low, high = (mass, high) if kept < shape.density else (low, mass)
    return round((low + high) / 2, 4)


def masks_density(pipeline: AnyPipeline, q: Tensor, k: Tensor) -> Tensor:
    """The density of each query head, `[Hq]`, in one call on this device."""
    scale = q.shape[-1] ** -0.5
    permutation = pipeline.permuter(q, k, bs.AttentionSpec(scale=scale))
    mask = pipeline.selector(pipeline.scorer(q, k, permutation, bs.AttentionSpec(scale=scale)))
    density: Tensor = mask.density()[0]
    return density


def measured(
    here: Here, make: Callable[[AnyPipeline], Attend], pipeline: AnyPipeline, qkv: QKV, N: int, budget: float
) -> Row:
    """Times and memory of `make(pipeline)` on what this rank has of `N` tokens: all, or a share of them."""
    together, spans = qkv[0].shape[2] < N, Spans(here.device)
    block = math.gcd(N // (2 * here.ranks), 2048)  # that of a shard's pieces, or a part of it
    call, split, masks, idle = map(
        make, (pipeline, timed(pipeline, spans), only_masks(pipeline), only_communication(block))
    )
    row: Row = {"ms": here.milliseconds(partial(call, *qkv), budget, together=together)}
    row["peak_bytes"] = here.peak(partial(call, *qkv), qkv, together=together)
    attending = []
    for _ in range(3):
        here.wait(together=together)
        split(*qkv)
        attending.append(here.worst(spans.taken(), together=together))
    row["attention_ms"] = statistics.median(attending)
    without = here.milliseconds(partial(masks, *qkv), budget / 3, together=together)
    sending = here.milliseconds(partial(idle, *qkv), budget / 3, together=True) if together else 0.0
    return row | {"communication_ms": sending, "masks_ms": max(0.0, without - sending)}


def at_length(here: Here, shape: Shape, N: int, mass: float | None, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one length."""
    qkv, budget = shape.inputs(N, here.device), arguments.budget
    mass = mass_for(shape, qkv, here.device) if mass is None else mass
    pipeline = shape.pipeline(mass, here.device)
    density = masks_density(pipeline, *qkv[:2])
    base = {"N": N, "mass": mass, "density": float(density.mean()), "of_heads": density.tolist()}
    low, high = float(density.min()), float(density.max())
    say(here, f"{N} tokens, mass {mass}, density {base['density']:.3f}, of heads {low:.3f} to {high:.3f}")
    rows: list[Row] = []
    want = pipeline(*qkv)  # compiles on every rank
    if here.rank == 0:
        one = measured(here, lambda pipeline: pipeline, pipeline, qkv, N, budget)
        rows.append(base | {"scheme": "one process", "ranks": 1} | one)
        say(here, told(rows[-1]))
    if here.mesh is None:
        return rows
    makers = {name: here.scheme(name, pipeline, density) for name in arguments.schemes}
    shards = {
        kind_of(name): [scheme.shard(x).contiguous() for x in (*qkv, want)] for name, scheme in makers.items()
    }
    del qkv, want
    here.release()
    for name, scheme in makers.items():
        q, k, v, expected = shards[kind_of(name)]
        some = slice(None, None, max(1, N >> 13))  # rows that are compared
        off = float(relative_l1(scheme(q, k, v)[:, :, some], expected[:, :, some]).nan_to_num(nan=math.inf).max())
        off = here.worst(off, together=True)
        if not off < 1e-2:
            raise WrongOutputError(f"{name}: relative L1 {off:.2e} from one process")
        row = base | {"scheme": name, "ranks": here.ranks, "bytes_sent": shape.bytes_sent(name, N, here.ranks)}
        rows.append(row | measured(here, partial(around, scheme), pipeline, (q, k, v), N, budget))
        say(here, told(rows[-1]))
    return rows


def kind_of(name: str) -> str:
    """The name of a scheme without its options."""
    return name.split(",")[0]


def around(scheme: Scheme, pipeline: AnyPipeline) -> Scheme:
    """The same scheme with another pipeline."""
    return evolve(scheme, attention=pipeline)


def told(row: Row) -> str:
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
    return (
        f"  {row['scheme']} on {row['ranks']}: {row['ms']:.1f} ms, attention {row['attention_ms']:.1f}, masks "
        f"{row['masks_ms']:.1f}, communication alone {row['communication_ms']:.1f}{peak}"
    )


def say(here: Here, text: str) -> None:
    if here.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 18, 1 << 20])
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HQ", "HKV", "D"))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--budget", type=float, default=1500.0, help="milliseconds for one figure")
    parser.add_argument("--limit", type=float, default=235.0, help="seconds after which the process ends itself")
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    here = Here.of(arguments.limit)
    Hq, Hkv, D = arguments.heads
    on_gpu = here.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = Shape(Hq, Hkv, D, arguments.block, arguments.density, dtype)
    results: Row = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "ranks": here.ranks,
    }
    rows: list[Row] = []
    for N in arguments.tokens:
        # Beyond 256K tokens the threshold stays: to find another one takes longer than to measure with it.
        mass = next((row["mass"] for row in reversed(rows) if "mass" in row), None) if N > 1 << 18 else None
        try:
            rows += at_length(here, shape, N, mass, arguments)
        except (WrongOutputError, torch.OutOfMemoryError) as error:
            rows.append({"N": N, "why": reason(error)})
            say(here, f"{N} tokens: {reason(error)}")
        if here.rank == 0:  # after every length, so that an end by time leaves what was measured
            file = arguments.out / f"distributed-{here.ranks}.json"
            file.write_text(json.dumps(results | {"rows": rows}, indent=1))
        here.release()
    if here.rank == 0:
        print(table(rows), flush=True)
    if here.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    with torch.no_grad():
        main()

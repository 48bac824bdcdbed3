"""One call of attention over the GPUs of a host, against one of them and against dense attention, sharded alike.

    torchrun --nproc-per-node 2 -m benchmarks.distributed --out results    # one GPU and two
    python -m benchmarks.distributed --out results                         # one GPU alone

It runs on CPUs through gloo, too: `--tokens 2048 --block 16`. One process must give what its mask means, and every
scheme what one process gives, up to 128K tokens with the same masks. Each row is written as soon as it is
measured: a table to `distributed-PIPELINE-RANKS.json`, and all figures to the same name in `raw`. `--out
docs/evidence/results` replaces those of the documentation. The process ends by itself after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import blocksparse as bs
from benchmarks.distributed_report import as_results, table
from benchmarks.distributed_stages import Spans, dense, only_communication, only_masks, timed, uniform
from benchmarks.inputs import QKV, everything, structured
from benchmarks.timing import WrongOutputError, check, reason, relative_l1
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.distributed.scheme import Scheme
from blocksparse.layers.head_groups import AnyPipeline

Row = dict[str, Any]
Attend = Callable[..., Tensor]

DENSE = "dense"  # one process and Ulysses, with dense attention
SCHEMES = ("ulysses", "ulysses, balanced", "all-gather", "ring", DENSE)
PIPELINES = ("auto", "pbs_attn")
MASKS = 1 << 17  # tokens up to which masks are compared
ONCE = 1 << 19  # tokens from which a call takes so long that one must do for several figures


@frozen
class Shape:
    """Heads of one layer, and a pipeline, of which `pbs_attn` has the density that is asked for."""

    Hq: int
    Hkv: int
    D: int
    block: int
    dtype: torch.dtype
    preset: str = "auto"
    density: float = 0.1

    def inputs(self, N: int, device: torch.device) -> QKV:
        torch.manual_seed(0)  # all ranks draw the same
        return structured(N, self.Hq, self.Hkv, self.D, device, self.dtype)

    def pipeline(self, mass: float | None = None) -> AnyPipeline:
        if mass is None:
            return bs.auto(block=self.block)
        return bs.pbs_attn(mass, block=self.block, S=2 * self.block)

    def facts(self, here: Here) -> Row:
        """What a table says of the figures in it."""
        chosen = (
            "`auto()`" if self.preset == "auto" else f"`pbs_attn` at the mass that gives density {self.density}"
        )
        machine = torch.cuda.get_device_name() if here.device.type == "cuda" else "CPU"
        launched = f"torchrun --nproc-per-node {here.ranks}" if here.mesh is not None else "python"
        backend = f", Triton {version('triton')}, NCCL" if here.device.type == "cuda" else ", gloo"
        return {
            "machine": f"{here.ranks} {machine} of one host",
            "date": datetime.now(UTC).date().isoformat(),
            "versions": f"torch {torch.__version__}{backend}",
            "command": f"`{launched} -m {shlex.join(['benchmarks.distributed', *sys.argv[1:]])}`",
            "inputs": f"structured q, k and v in {str(self.dtype).removeprefix('torch.')}, {self.Hq} query and "
            f"{self.Hkv} KV heads of dim {self.D}, causal; {chosen} against PyTorch's fastest dense kernel",
        }

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

    def every(self, x: Sequence[float], *, together: bool) -> Tensor:
        """`x` of every rank, `[ranks, len(x)]`, or of this one alone."""
        mine = torch.tensor(x, dtype=torch.float64, device=self.device)
        if not together or self.mesh is None:
            return mine[None]
        them = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(them, mine)
        return torch.stack(them)

    def worst(self, x: float, *, together: bool) -> float:
        """The greatest `x` of all ranks."""
        return float(self.every([x], together=together).max())

    def attempt(self, work: Callable[[], Row]) -> Row:
        """What comes of the work, or on all ranks a row that says why it fails on one of them."""
        try:
            row, failed = work(), False
        except (WrongOutputError, torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            row, failed = {"why": reason(error)}, True
        if self.worst(failed, together=True) and not failed:  # all ranks ask, those that failed too
            return {"why": "another rank failed"}
        return row

    def milliseconds(self, call: Callable[[], object], budget_ms: float, *, together: bool) -> float:
        """The median over repeats of the time from a common start until the last rank has ended.

        At least three of them, or one that takes the whole budget.
        """
        times: list[float] = []
        while (len(times) < 3 and max(times, default=0.0) < budget_ms) or (
            sum(times) < budget_ms and len(times) < 20
        ):
            self.wait(together=together)
            start = time.perf_counter()
            call()
            self.wait(together=False)
            times.append(self.worst((time.perf_counter() - start) * 1e3, together=together))
        return statistics.median(times)

    def peak(self, call: Callable[[], object], inputs: Sequence[Tensor], *, together: bool) -> int | None:
        """The most memory of a call, its inputs included, on the rank with the most; None where nobody counts."""
        if self.device.type != "cuda":
            call()
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


def mass_for(shape: Shape, qkv: QKV) -> float:
    """The threshold at which `pbs_attn` keeps about the density that is asked for; all ranks find the same."""
    low, high = 0.3, 0.999
    for _ in range(7):
        mass = (low + high) / 2
        kept = float(shape.pipeline(mass).choose(*qkv[:2]).mask.density().mean())
        low, high = (mass, high) if kept < shape.density else (low, mass)
    return round((low + high) / 2, 4)


def measured(
    here: Here,
    make: Callable[[AnyPipeline], Attend],
    pipeline: AnyPipeline,
    qkv: QKV,
    N: int,
    budget: float,
    checked: Callable[[Tensor], None],
    *,
    cold: bool,
) -> Row:
    """Times and memory of `make(pipeline)` on what this rank has of `N` tokens: all, or a share of them.

    Args:
        checked: gets the output of a call, and raises if it is wrong.
        cold: whether to measure the first call, and no other before it.
    """
    together, spans = qkv[0].shape[2] < N, Spans(here.device)
    block = math.gcd(N // (2 * here.ranks), 2048)  # that of a shard's pieces, or a part of it
    split, masks, idle = map(make, (timed(pipeline, spans), only_masks(pipeline), only_communication(block)))
    call = split if N >= ONCE else make(pipeline)  # of which launches are replayed, unlike those of a `split`
    row: Row = {}
    attending: list[float] = []
    outputs: list[Tensor] = []

    def attend() -> None:
        outputs.clear()
        outputs.append(call(*qkv))
        attending.append(spans.taken())

    def repeat() -> None:
        row["ms"] = here.milliseconds(attend, budget, together=together)

    if not cold:
        for _ in range(2):  # the second one compiles what a repeated call needs
            attend()
            checked(outputs.pop())
        attending.clear()
    row["peak_bytes"] = here.peak(repeat, qkv, together=together)
    row["calls"] = len(attending)  # of which `ms` is the median
    last = outputs.pop()
    if cold:
        checked(last)
    del last
    if call is not split:
        attending.clear()
        for _ in range(3):
            here.wait(together=together)
            split(*qkv)
            attending.append(spans.taken())
    each = here.every(attending, together=together)  # [ranks, calls]
    row["attention_ms"] = float(each.amax(0).median())
    row["longest_over_mean"] = float((each.amax(0) / each.mean(0)).median())
    without = here.milliseconds(partial(masks, *qkv), budget / 3, together=together)
    sending = here.milliseconds(partial(idle, *qkv), budget / 3, together=True) if together else 0.0
    return row | {"communication_ms": sending, "masks_ms": max(0.0, without - sending)}


def near(here: Here, out: Tensor, want: Tensor, N: int, *, by_row: bool = False) -> None:
    """Compare an output with that of one process, in some rows of each head.

    Raises:
        WrongOutputError: on every rank, if the relative L1 distance of a head or row is 1e-2 or more on one.
    """
    some = slice(None, None, max(1, N >> 13))
    out, want = out[:, :, some], want[:, :, some]
    off = (out - want).abs().sum(3) / want.abs().sum(3) if by_row else relative_l1(out, want)
    worst = here.worst(float(off.nan_to_num(nan=math.inf).max()), together=True)
    if not worst < 1e-2:
        what = "other blocks than one process" if by_row else "from one process"
        raise WrongOutputError(f"relative L1 {worst:.2e} {what}")


def at_length(
    here: Here, shape: Shape, N: int, mass: float | None, arguments: argparse.Namespace
) -> Iterator[Row]:
    """The rows of one length, each as soon as it is measured; what fails is a row that says why."""
    if DENSE in arguments.schemes:
        whole = dense(math.gcd(N, 2048))
        yield from of_pipeline(here, shape, N, whole, ["ulysses"], {DENSE: True}, arguments.budget)
    if shape.preset == "pbs_attn" and mass is None:
        mass = mass_for(shape, shape.inputs(N, here.device))
    schemes = [name for name in arguments.schemes if name != DENSE]
    yield from of_pipeline(here, shape, N, shape.pipeline(mass), schemes, {"mass": mass}, arguments.budget)


def of_pipeline(
    here: Here, shape: Shape, N: int, pipeline: AnyPipeline, schemes: Sequence[str], about: Row, budget: float
) -> Iterator[Row]:
    """A row for one process, which all ranks are at the same time, and one for each scheme."""
    here.release()
    qkv, whole = shape.inputs(N, here.device), DENSE in about
    mask = everything(*qkv[:2], block=shape.block) if whole else pipeline.choose(*qkv[:2]).mask
    density = torch.ones(shape.Hq) if whole else mask.density()[0]
    base = {"N": N, "density": float(density.mean()), **about}
    low, high = float(density.min()), float(density.max())
    what = DENSE if whole else shape.preset
    say(here, f"{N} tokens, {what}, density {base['density']:.3f}, of heads {low:.3f} to {high:.3f}")
    cold = whole and N >= ONCE
    if cold:  # in one KV head, so that the call that is measured finds its kernel ready
        q, k, v = (x[0, : x.shape[1] // shape.Hkv][None] for x in qkv)
        pipeline(q, k, v)
    measure = partial(measured, N=N, budget=budget, cold=cold)
    found: list[Tensor] = []

    def keep(out: Tensor) -> None:
        check(out, *qkv, mask)
        found.append(out)

    alone = base | {"scheme": "one process", "ranks": 1, "of_heads": density.tolist()}
    alone |= here.attempt(lambda: measure(here, lambda its: its, pipeline, qkv, checked=keep))
    say(here, told(alone))
    yield alone
    if "why" in alone or here.mesh is None:
        return
    same_keys = uniform(pipeline)
    tell = same_keys(*qkv) if N <= MASKS and not whole else None
    for name in schemes:
        here.release()

        def of_scheme(name: str = name) -> Row:
            scheme = here.scheme(name, pipeline, density)
            q, k, v, want = (scheme.shard(x).contiguous() for x in (*qkv, found[0]))
            if tell is not None:
                near(here, around(scheme, same_keys)(q, k, v), scheme.shard(tell), N, by_row=True)
            checked = partial(near, here, want=want, N=N)
            row = {"bytes_sent": shape.bytes_sent(name, N, here.ranks), "same_masks": tell is not None or None}
            return row | measure(here, partial(around, scheme), pipeline, (q, k, v), checked=checked)

        row = base | {"scheme": name, "ranks": here.ranks} | here.attempt(of_scheme)
        say(here, told(row))
        yield row


def around(scheme: Scheme, pipeline: AnyPipeline) -> Scheme:
    """The same scheme with another pipeline."""
    return evolve(scheme, attention=pipeline)


def told(row: Row) -> str:
    if "why" in row:
        return f"  {row['scheme']} on {row['ranks']}: {row['why']}"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
    return (
        f"  {row['scheme']} on {row['ranks']}: {row['ms']:.1f} ms, attention {row['attention_ms']:.1f} "
        f"({row['longest_over_mean']:.3f} of the mean), masks {row['masks_ms']:.1f}, "
        f"communication alone {row['communication_ms']:.1f}{peak}"
    )


def say(here: Here, text: str) -> None:
    if here.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 19, 1 << 20])
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HQ", "HKV", "D"))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--pipeline", choices=PIPELINES, default="auto")
    parser.add_argument("--density", type=float, default=0.1, help="of pbs_attn")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--budget", type=float, default=1500.0, help="milliseconds for one figure")
    parser.add_argument("--limit", type=float, default=235.0, help="seconds after which the process ends itself")
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    (arguments.out / "raw").mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    here = Here.of(arguments.limit)
    on_gpu = here.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    Hq, Hkv, D = arguments.heads
    shape = Shape(Hq, Hkv, D, arguments.block, dtype, arguments.pipeline, arguments.density)
    file = f"distributed-{arguments.pipeline}-{here.ranks}.json"
    facts = shape.facts(here)
    rows: list[Row] = []
    # Kernels and connections that no later call loads, since dense attention may be called once.
    whole, inputs = dense(128), shape.inputs(4096, here.device)
    whole(*inputs)
    if here.mesh is not None:
        scheme = here.scheme("ulysses", whole, torch.ones(Hq))
        scheme(*map(scheme.shard, inputs))
    del inputs
    for N in arguments.tokens:
        # Beyond 256K tokens the threshold stays: to find another one takes longer than to measure with it.
        mass = next((row["mass"] for row in reversed(rows) if "mass" in row), None) if N > 1 << 18 else None
        for row in at_length(here, shape, N, mass, arguments):
            rows.append(row)
            if here.rank == 0:
                results = facts | {"kept": f"raw/{file}", "keys": 2} | as_results(rows)
                (arguments.out / file).write_text(json.dumps(results, indent=1))
                (arguments.out / "raw" / file).write_text(json.dumps(facts | {"rows": rows}, indent=1))
    if here.rank == 0:
        print(table(rows), flush=True)
    if here.mesh is not None:
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    with torch.no_grad():
        main()

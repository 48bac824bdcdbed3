"""Check, then time: what fails its check gets no time, only the reason why."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.check.per_head import by_head
from blocksparse.tools.bench import ROUNDS as ROUNDS
from blocksparse.tools.bench import Figure as Figure
from blocksparse.tools.bench import medians as medians

Call = Callable[[], Tensor]
"""Attends: `[B, Hq, M, Dv]`."""


class WrongOutputError(RuntimeError):
    """An output is not what its mask means."""


class CannotRunError(RuntimeError):
    """Someone's reasons not to take part."""


def check(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: bs.BlockMask,
    *,
    spec: bs.AttentionSpec | None = None,
    samples: int = 6,
    tolerance: float = 1e-2,
) -> None:
    """Sampled rows of blocks of `out` `[1, Hq, M, Dv]` against what `mask` and `spec` mean, in float64.

    q, k, v and `out` are in original order, whatever the order of the mask's slots.

    Raises:
        WrongOutputError: an output is not finite, or off by more than half precision explains.
    """
    grid, offset = mask.grid, k.shape[2] - q.shape[2]
    per_mask = q.shape[1] // mask.keep.shape[1]
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    for _ in range(samples):
        h = int(torch.randint(q.shape[1], (), generator=generator))
        row = int(torch.randint(grid.rows, (), generator=generator))
        kv = h * k.shape[1] // q.shape[1]
        query = mask.queries(row)[0, h]
        key = mask.slots(row)[0, h][mask.keep[0, h // per_mask, row]].flatten().long()
        key = key[key >= 0]
        some_q, some_k, some_v = q[0, h, query].double(), k[0, kv, key].double(), v[0, kv, key].double()
        logits = some_q @ some_k.T * q.shape[-1] ** -0.5
        if spec is not None and spec.softcap is not None:
            logits = spec.softcap * (logits / spec.softcap).tanh()
        last = query[:, None] + offset  # the last key that each query sees
        if grid.causal:
            logits = logits.masked_fill(key > last, float("-inf"))
        if grid.window is not None:
            logits = logits.masked_fill(key <= last - grid.window, float("-inf"))
        if spec is not None and spec.sinks is not None:
            sink = by_head(spec.sinks, q)[h].double()
            logits = torch.cat((logits, sink.expand(len(logits), 1)), dim=-1)
            some_v = torch.cat((some_v, some_v.new_zeros(1, some_v.shape[-1])))
        want = logits.softmax(-1) @ some_v
        error = float((out[0, h, query].double() - want).norm() / want.norm())
        if not error < tolerance:
            raise WrongOutputError(f"head {h}, row {row}: relative error {error:.2e}")


def relative_l1(out: Tensor, want: Tensor) -> Tensor:
    """`sum|out - want| / sum|want|` of each head, `[Hq]`, of two `[1, Hq, rows, Dv]`."""
    distance = (out.double() - want.double()).abs().sum((0, 2, 3))
    return distance / want.double().abs().sum((0, 2, 3))


def check_near(out: Tensor, want: Tensor, *, tolerance: float) -> float:
    """Relative L1 distance of `out` from `want`, `[1, Hq, rows, Dv]`, mean over heads.

    Raises:
        WrongOutputError: that of some head is not finite, or not less than `tolerance`.
    """
    errors = relative_l1(out, want)
    worst = int(errors.nan_to_num(nan=float("inf")).argmax())
    if not float(errors[worst]) < tolerance:
        raise WrongOutputError(f"head {worst}: relative L1 {float(errors[worst]):.2e}, not under {tolerance}")
    return float(errors.mean())


def some_rows(length: int, device: torch.device, *, samples: int = 256) -> Tensor:
    """Indices of queries, drawn from the device's generator, `[samples]` int64."""
    return torch.randint(length, (samples,), device=device)


def reason(error: Exception) -> str:
    """One line, short enough for a table's note."""
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return first if type(error) is CannotRunError else f"{type(error).__name__}: {first}"


@frozen
class Candidate:
    """How to build a call, and how to tell whether its output is right."""

    build: Callable[[], Callable[[], Any]]  # what it does stays out of the time
    verify: Callable[[Any], None]  # of what the call gives; raises


def ready(call: Call) -> Callable[[], Call]:
    """The builder of a call that needs no building."""
    return lambda: call


def attempt(row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`row` with what comes of the work, or why nothing does."""
    try:
        return row | work()
    except Exception as error:  # who cannot run is a row that says why
        return row | {"why": reason(error)}


def measure(candidates: Mapping[str, Candidate], *, device: torch.device, budget_ms: float) -> dict[str, Figure]:
    """Milliseconds of every call that can be built and passes its check; of the others, the reason why not.

    The calls take turns. Each turn begins with a while of the same call, untimed: the clock that a chip allows
    itself depends on the power of what ran just before.
    """
    calls: dict[str, Callable[[], Any]] = {}
    figures: dict[str, Figure] = {}
    for name, candidate in candidates.items():
        try:
            call = candidate.build()
            candidate.verify(call())
            calls[name] = call
        except Exception as error:  # who cannot run is a figure that says why
            figures[name] = Figure(why=reason(error))
    figures |= medians(calls, device=device, budget_ms=budget_ms)
    return {name: figures[name] for name in candidates}


def host_ms(*calls: Callable[[], object], device: torch.device, repeats: int = 20) -> list[float]:
    """Milliseconds until each call returns, by a GPU with nothing else to do; medians.

    They take turns, since the speed of a host that others use too changes from one moment to the next.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, its in zip(calls, times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            call()
            its.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    return [statistics.median(its) for its in times]


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that one call holds beyond its inputs and its output; None where nobody counts."""
    if device.type != "cuda":
        return None
    call()  # libraries take workspaces at their first call
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - out.numel() * out.element_size()


def release(device: torch.device) -> None:
    """Give back what earlier rows held, so that no row meets a fragmented memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""What the GPU does in a call, kernel by kernel, and what launching nothing costs the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import CannotRunError, synchronize

_NAME = 120  # characters; kernels of PyTorch have names of hundreds


@frozen
class Work:
    """What one call has the GPU do."""

    ms: float  # of its kernels, copies and fills, without the gaps between them
    launches: int
    kernels: dict[str, tuple[int, float]]  # launches and milliseconds of each name, the longest first


def work_of(call: Callable[[], object], device: torch.device, *, repeats: int = 3) -> Work:
    """Profile a call. Launches of the process take longer from then on: measure times of the host before.

    Raises:
        CannotRunError: the device is no GPU, or the profiler saw nothing.
    """
    call()
    if device.type != "cuda":
        raise CannotRunError("kernels are counted on GPUs")
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        synchronize(device)
    return summed(profiler.events() or (), repeats)


def summed(events: Iterable[Any], repeats: int) -> Work:
    """The events of a profiler that ran on the GPU, for each of the repeats."""
    found: dict[str, list[float]] = {}
    for event in events:
        # Annotations stand in the GPU's timeline too, over the kernels that they hold.
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            found.setdefault(event.name[:_NAME], []).append(event.time_range.elapsed_us() / 1e3)
    if not found:
        raise CannotRunError("the profiler saw no kernel")
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))
    return Work(
        sum(map(sum, found.values())) / repeats,
        round(sum(map(len, found.values())) / repeats),
        {name: (round(len(times) / repeats), sum(times) / repeats) for name, times in longest},
    )


def empty_launches(count: int, device: torch.device) -> Callable[[], None]:
    """Launches so many empty Triton kernels, as Triton does it; the kernel is compiled beforehand."""
    from benchmarks.empty_triton import empty

    x = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(count):
            empty[(1,)](x)

    launch()
    return launch

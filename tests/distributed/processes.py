"""Processes of one host that talk through gloo; none but the one they are forked from outlives its test."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

WAIT = 180.0  # seconds that a process group waits for a rank; a slow machine takes a minute to start four
LIMIT = 600.0  # seconds after which processes are killed
# Imported once, by a process that does nothing else, and no rank imports them anew. Determinism needs Inductor.
PRELOADED = [
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "tests.distributed.test_schemes",
]


def _start(rank: int, size: int, folder: str, work: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what nobody writes reads as NaN
    path = Path(folder)
    store = FileStore(str(path / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=WAIT))
    try:
        with torch.no_grad():
            result = work(rank, *arguments)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, path / f"{rank}.part")
    (path / f"{rank}.part").rename(path / f"{rank}.pt")
    # No farewell: a rank that raised must not wait for others, nor they for it.


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns in each process; its traceback if it raises, and None if it dies."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_start, args=(rank, size, folder, work, *arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
            process.join()
        assert not hung, f"{len(hung)} of {size} processes hung"
        files = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]

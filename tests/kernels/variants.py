"""How often each kernel would be compiled for prompts of many lengths, and whether an engine's warm-up compiles all of it.

    python -m tests.kernels.variants lengths  # a line per target, pipeline and kernel
    python -m tests.kernels.variants engine   # a line per preset

Run as a script, in a process of its own: the test suite interprets kernels. Nothing is compiled or run here.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import blocksparse as bs
from blocksparse.hosts.serving.warm import sizes
from blocksparse.testing import every_preset
from tests.kernels.launched import gathered
from tests.on_kernels import small_preset, untouched_zeros

LENGTHS, LONGEST = 40, 16384
# By target: how many times the least sizes its pipelines have; Hopper's kernels take 64 queries.
FACTORS = {"sm_80": 1, "sm_90": 4}
CHUNK, LEAST, MOST, REQUESTS = 8192, 10000, 131072, 40  # tokens of an engine


def pipelines(factor: int) -> dict[str, bs.Pipeline[Any, Any, Any]]:
    """Every preset, and on Hopper 8 bits."""
    found = {name: small_preset(name, factor) for name in every_preset}
    if factor > 1:
        found["sparge in 8 bits"] = evolve(found["sparge"], executor=bs.Int8Executor())
    return found


def many_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    for target, factor in FACTORS.items():
        lengths = torch.randint(1, LONGEST + 1, (LENGTHS,), generator=generator).tolist()
        for name, pipeline in pipelines(factor).items():
            with gathered(target, hopper=target == "sm_90") as launched:
                for i, N in enumerate(lengths):
                    chunk = N if i % 3 else N // 2 + 1  # every third call is one of a prompt's later half
                    q, k, v = (untouched_zeros(1, *x, 64, dtype=torch.half) for x in ((4, chunk), (2, N), (2, N)))
                    pipeline(q, k, v)
            for kernel, count in sorted(Counter(variant.name for variant in launched.values()).items()):
                print(f"{target} {name.replace(' ', '_')} {kernel} {count}")


def needed(pipeline: bs.Pipeline[Any, Any, Any], requests: Iterable[tuple[int, int]]) -> set[str]:
    """What these requests of an engine, with so many queries and keys, would have compiled."""
    with gathered("sm_90", hopper=True) as launched, pytest.MonkeyPatch.context() as monkeypatch:
        has = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: has)
        for M, N in requests:
            q, out = (untouched_zeros(M, 4, 128, dtype=torch.half).transpose(0, 1)[None] for _ in "qo")
            k, v = (untouched_zeros(1, 1, N, 128, dtype=torch.half) for _ in "kv")
            pipeline(q, k, v, out=out)
    return set(launched)


def engine() -> None:
    draw = random.Random(0)
    for name in ("auto", "sparge"):
        pipeline = evolve(every_preset[name](), executor=bs.TritonExecutor())
        requests = [
            (draw.choice((CHUNK, draw.randint(65, CHUNK))), draw.randint(LEAST, MOST)) for _ in range(REQUESTS)
        ]
        compiled = needed(pipeline, sizes(CHUNK, LEAST, MOST))
        missing = needed(pipeline, requests) - compiled
        print(name, len(compiled), len(missing), *sorted({key.split()[0] for key in missing}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    {"lengths": many_lengths, "engine": engine}[sys.argv[1]]()

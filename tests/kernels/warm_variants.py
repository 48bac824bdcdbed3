"""Whether the sizes in which an engine warms up compile all that its requests need; prints a line per preset.

Run as a script, in a process of its own, as `count_variants.py`, which says how launches are read.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from triton.backends.compiler import GPUTarget

import blocksparse as bs
from blocksparse.execute import int8
from blocksparse.hosts.serving.warm import sizes
from blocksparse.kernels.attention import gather_attention
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.testing import every_preset
from tests.kernels.count_variants import recorded
from tests.on_kernels import pretend_gpu, untouched_zeros, zeros_for_empty

CHUNK, LEAST, MOST, REQUESTS = 8192, 10000, 131072, 40  # tokens


def needed(pipeline: bs.Pipeline[Any, Any, Any], requests: Iterable[tuple[int, int]]) -> set[tuple[str, str]]:
    """What these requests, with so many queries and keys, would have compiled."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        variants = recorded(monkeypatch, GPUTarget("cuda", 90, 32))
        for M, N in requests:
            q, out = (untouched_zeros(M, 4, 128, dtype=torch.half).transpose(0, 1)[None] for _ in "qo")
            k, v = (untouched_zeros(1, 1, N, 128, dtype=torch.half) for _ in "kv")
            pipeline(q, k, v, out=out)
        return {(kernel, variant) for kernel, found in variants.items() for variant in found}


def main() -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    draw = random.Random(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch, TARGETS["sm_90"])
        has = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: has)
        for module in (int8, tiles, gather_attention):
            monkeypatch.setattr(module, "is_hopper", lambda device: True)
        zeros_for_empty(monkeypatch)
        for name in sys.argv[1:] or ("auto", "sparge"):
            pipeline = evolve(every_preset[name](), executor=bs.TritonExecutor())
            requests = [
                (draw.choice((CHUNK, draw.randint(65, CHUNK))), draw.randint(LEAST, MOST)) for _ in range(REQUESTS)
            ]
            compiled = needed(pipeline, sizes(CHUNK, LEAST, MOST))
            missing = needed(pipeline, requests) - compiled
            print(name, len(compiled), len(missing), *sorted({kernel for kernel, _ in missing}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often each kernel would be compiled for prompts of many lengths; prints one line per target, pipeline and kernel.

Run as a script, in a process of its own: the test suite interprets kernels. Nothing is compiled or run here. Launches
are bound as Triton binds them, which says what each would be compiled for; what they would have written stays zeros.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from attrs import evolve
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import blocksparse as bs
from blocksparse.execute import int8
from blocksparse.kernels.attention import gather_attention
from blocksparse.kernels.common import tiles
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.testing import every_preset
from tests.on_kernels import pretend_gpu, small_preset, untouched_zeros, zeros_for_empty

LENGTHS = 40
# By target: how many times the least sizes its pipelines have; Hopper's kernels take 64 queries.
FACTORS = {"sm_80": 1, "sm_90": 4}
LONGEST = 16384


def recorded(monkeypatch: pytest.MonkeyPatch, target: GPUTarget) -> dict[str, set[str]]:
    """Where launches leave what they would be compiled for, by kernel."""
    variants: dict[str, set[str]] = defaultdict(set)
    backend = make_backend(target)
    binders: dict[JITFunction, Any] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binders[self](*args, **kwargs)
        variants[f"{self.module.rpartition('.')[2]}.{self.fn.__name__}"].add(repr((specialization, options)))

    monkeypatch.setattr(JITFunction, "run", run)
    return variants


def pipelines(factor: int) -> dict[str, bs.Pipeline[Any, Any, Any]]:
    """Every preset, and on Hopper 8 bits."""
    found = {name: small_preset(name, factor) for name in every_preset}
    if factor > 1:
        found["sparge in 8 bits"] = evolve(found["sparge"], executor=bs.Int8Executor())
    return found


def main() -> int:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    for target, factor in FACTORS.items():
        lengths = torch.randint(1, LONGEST + 1, (LENGTHS,), generator=generator).tolist()
        with pytest.MonkeyPatch.context() as monkeypatch:
            pretend_gpu(monkeypatch, TARGETS[target])
            for module in (int8, tiles, gather_attention):
                monkeypatch.setattr(module, "is_hopper", lambda device, is_one=target == "sm_90": is_one)
            zeros_for_empty(monkeypatch)
            for name, pipeline in pipelines(factor).items():
                with monkeypatch.context() as of_pipeline:
                    variants = recorded(of_pipeline, GPUTarget("cuda", int(target[3:]), 32))
                    for i, N in enumerate(lengths):
                        chunk = N if i % 3 else N // 2 + 1  # every third call is one of a prompt's later half
                        q, k, v = (
                            untouched_zeros(1, *x, 64, dtype=torch.half) for x in ((4, chunk), (2, N), (2, N))
                        )
                        pipeline(q, k, v)
                for kernel, found in sorted(variants.items()):
                    print(f"{target} {name.replace(' ', '_')} {kernel} {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

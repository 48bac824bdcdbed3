"""A GPU on which a program may take 48 KiB of shared memory: presets run there with smaller tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from triton.runtime.errors import OutOfResources

import blocksparse as bs
from blocksparse.kernels.common.hardware import TARGETS
from blocksparse.launch.launches import LookedUp
from blocksparse.testing import every_preset, make_qkv
from tests.kernels.foretold import foretold
from tests.machine import GPU
from tests.on_kernels import pretend_gpu

SMALL = evolve(TARGETS["sm_86"], shared=48 << 10)


def launch_within(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches fail as Triton lets them fail if they take more; their kernels are in the list."""
    launch, seen = LookedUp._launch, []

    def checked(self: Any, grid: Any, *args: Any, **named: Any) -> None:
        name = f"{self.jit.fn.__module__.rpartition('.')[2]}.{self.jit.fn.__name__}"
        itemsizes = [x.element_size() for x in args if isinstance(x, torch.Tensor)]
        needs = foretold(SMALL, name, {"num_stages": 1, **named}, itemsizes)
        if needs is not None:
            seen.append(name)
            if needs > SMALL.shared:
                raise OutOfResources(needs, SMALL.shared, "shared memory")
        launch(self, grid, *args, **named)

    monkeypatch.setattr(LookedUp, "_launch", checked)
    return seen


@pytest.mark.skipif(GPU, reason="pretends another GPU than there is")
@pytest.mark.parametrize(
    ("name", "D"),
    [
        *(
            pytest.param(name, 128, marks=[pytest.mark.slow] * (name not in ("auto", "s2o")))
            for name in every_preset
        ),
        *(pytest.param(name, 256, marks=pytest.mark.slow) for name in ("pbs_attn", "minference", "s2o")),
    ],
)
def test_every_preset_runs_in_48_kib(name: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks as large as it has by default."""
    pipeline = every_preset[name]()
    if isinstance(pipeline.executor, bs.AutoExecutor):
        pipeline = evolve(pipeline, executor=bs.TritonExecutor())
    q, k, v = make_qkv(Hq=2, Hkv=1, N=300, D=D, dtype=torch.float16)
    pretend_gpu(monkeypatch, SMALL)
    seen = launch_within(monkeypatch)
    out = pipeline(q, k, v)
    assert seen
    if not isinstance(pipeline.executor, bs.GatherExecutor):  # which stops early
        want = evolve(pipeline, executor=bs.ReferenceExecutor())(q, k, v)
        assert float((out - want).abs().max()) < 4e-3

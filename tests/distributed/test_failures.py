"""A rank that raises or dies ends the calls of all others with a clear error, and nothing hangs."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import blocksparse as bs
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.testing import make_qkv
from tests.distributed.processes import on_ranks

TIMEOUT = 4.0  # seconds that a group waits
SCHEMES = (Ulysses, AllGatherKV, Ring)


@attrs.frozen(eq=False)
class Breaks(bs.Scorer[bs.GlobalPermutation, bs.BlockMass]):
    """A scorer that fails on one rank."""

    on_rank: int
    dies: bool

    def __call__(
        self, q: Tensor, k: Tensor, permutation: bs.GlobalPermutation, *, causal: bool, scale: float
    ) -> bs.BlockMass:
        if dist.get_rank() == self.on_rank:
            if self.dies:
                os._exit(3)
            raise ZeroDivisionError("this rank fails")
        return bs.MeanPoolScorer(16)(q, k, permutation, causal=causal, scale=scale)


def _alignment() -> None:
    from blocksparse.distributed import alignment

    alignment.register(Breaks, lambda stage, causal: 16)


def in_a_group(scheme: Any, *, dies: bool) -> tuple[str, float]:
    """What two calls raise, and after how many seconds."""
    _alignment()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
    pipeline = bs.Pipeline(bs.Identity(), Breaks(1, dies), bs.TopK(1), bs.CpuExecutor())
    q, k, v = make_qkv(N=64)
    start = time.monotonic()
    try:
        for _ in range(2):  # a rank may have all that it needs of a rank which breaks, but not a second time
            scheme(pipeline, mesh, "ranks")(q, k, v)
    except (RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing was raised", time.monotonic() - start


def breaking(rank: int) -> dict[str, tuple[str, float]]:
    """Rank 1 raises in a call of each scheme, and then dies in one."""
    seen = {scheme.__name__: in_a_group(scheme, dies=False) for scheme in SCHEMES}
    if rank == 1:
        assert {text for text, _ in seen.values()} == {"ZeroDivisionError: this rank fails"}
    seen["dead"] = in_a_group(Ulysses, dies=True)
    return seen


@pytest.mark.slow
def test_a_rank_that_raises_or_dies_ends_all() -> None:
    waiting, dead = on_ranks(2, breaking)
    assert dead is None
    assert isinstance(waiting, dict), waiting
    assert list(waiting) == [*(scheme.__name__ for scheme in SCHEMES), "dead"]
    for text, seconds in waiting.values():
        assert text.startswith("RuntimeError: rank 0 of mesh dimension 'ranks' got no answer while "), text
        assert ". " not in text
        assert seconds < 3 * TIMEOUT


def test_processes_that_hang_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.processes.LIMIT", 0.1)
    with pytest.raises(AssertionError, match="1 of 1 processes hung"):
        on_ranks(1, breaking)

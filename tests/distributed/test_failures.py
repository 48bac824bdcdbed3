"""A rank that raises or dies ends the calls of all others with a clear error, and nothing hangs."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
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
        self, q: Tensor, k: Tensor, permutation: bs.GlobalPermutation, spec: bs.AttentionSpec
    ) -> bs.BlockMass:
        if dist.get_rank() == self.on_rank:
            if self.dies:
                os._exit(3)
            raise ZeroDivisionError("this rank fails")
        return bs.MeanPoolScorer(16)(q, k, permutation, spec)

    def alignment(self, causal: bool) -> int:
        return 16


def in_a_group(_rank: int, scheme: Any, dies: bool) -> tuple[str, float]:
    """What two calls raise where rank 1 raises or dies, and after how many seconds."""
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


@pytest.mark.slow
def test_a_rank_that_raises_or_dies_ends_all() -> None:
    """Each in processes of its own, all at the same time, because they do little but wait."""
    runs = [*((scheme, False) for scheme in SCHEMES), (Ulysses, True)]
    with ThreadPoolExecutor(len(runs)) as threads:
        results = list(threads.map(lambda run: on_ranks(2, in_a_group, *run), runs))
    for (_, dies), (waiting, broken) in zip(runs, results, strict=True):
        assert isinstance(waiting, tuple), waiting
        text, seconds = waiting
        assert text.startswith("RuntimeError: rank 0 of mesh dimension 'ranks' got no answer while "), text
        assert seconds < 3 * TIMEOUT
        if dies:
            assert broken is None
        else:
            assert isinstance(broken, tuple), broken
            assert broken[0] == "ZeroDivisionError: this rank fails"


def hang(_rank: int) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_processes_that_hang_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.processes.LIMIT", 0.1)
    with pytest.raises(AssertionError, match="1 of 1 processes hung"):
        on_ranks(1, hang)

"""Every scheme is one process: masks exactly, outputs and lse within budget. Each test starts processes once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from blocksparse.distributed import Ulysses
from tests.distributed.cases import FOUR, PBS, TWO, TWO_BY_TWO, Case
from tests.distributed.processes import on_ranks
from tests.distributed.refusals import REFUSED

Failures = dict[str, str]


def failures(cases: Mapping[str, Case], mesh: DeviceMesh) -> Failures:
    """The tracebacks of the cases that raise. Ranks wait for one another, so that no case meets the next one."""
    found = {}
    for name, case in cases.items():
        try:
            case(mesh)
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def on_two(_rank: int) -> Failures:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    found = failures({**TWO, **REFUSED}, mesh)
    dist.destroy_process_group()
    try:
        with pytest.raises(RuntimeError, match=r"no process group is initialised\. Call"):
            Ulysses(PBS, mesh, "ranks")
    except BaseException:
        found["not initialised"] = traceback.format_exc()
    return found


def on_four(_rank: int) -> Failures:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    return failures(FOUR, line) | failures(TWO_BY_TWO, square)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "work"), [(2, on_two), (4, on_four)])
def test_every_scheme_is_one_process(size: int, work: Callable[[int], Failures]) -> None:
    results = on_ranks(size, work)
    assert results == [{}] * size, "\n".join(
        f"rank {rank}: {text}"
        for rank, result in enumerate(results)
        for text in ([str(result)] if not isinstance(result, dict) else map("\n".join, result.items()))
    )

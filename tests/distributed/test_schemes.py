"""Every scheme is one process, a rank that dies ends the others, and where sequences are cut."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import blocksparse as bs
from blocksparse.distributed import AllGatherKV, Ring, Ulysses
from blocksparse.distributed.heads import shares, spread
from blocksparse.distributed.pieces import Piece, cut, head_tail, in_order, regions
from blocksparse.testing import make_qkv
from tests.distributed.cases import FOUR, PBS, TWO, TWO_BY_TWO, Case
from tests.distributed.processes import on_ranks
from tests.distributed.refusals import REFUSED
from tests.tiny_model import tiny_llama

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
    refused = {name: REFUSED[name] for name in ("one rank is refused", "ranks with other pipelines")}
    return failures({**FOUR, **refused}, line) | failures(TWO_BY_TWO, square)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "work"), [(2, on_two), (4, on_four)])
def test_every_scheme_is_one_process(size: int, work: Callable[[int], Failures]) -> None:
    results = on_ranks(size, work)
    assert results == [{}] * size, "\n".join(
        f"rank {rank}: {text}"
        for rank, result in enumerate(results)
        for text in ([str(result)] if not isinstance(result, dict) else map("\n".join, result.items()))
    )


TIMEOUT = 4.0  # seconds that a group waits
SCHEMES = (Ulysses, AllGatherKV, Ring)


@attrs.frozen(eq=False)
class Breaks(bs.Scorer[bs.GlobalPermutation, bs.BlockMass]):
    """A scorer that fails on one rank."""

    on_rank: int
    dies: bool

    def __call__(self, q: Tensor, k: Tensor, permutation: Any, spec: bs.AttentionSpec) -> bs.BlockMass:
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
    runs = [*((2, scheme, False) for scheme in SCHEMES), (2, Ulysses, True), (4, AllGatherKV, False)]
    with ThreadPoolExecutor(len(runs)) as threads:
        results = list(threads.map(lambda run: on_ranks(run[0], in_a_group, *run[1:]), runs))
    for (_, _, dies), (first, broken, *others) in zip(runs, results, strict=True):
        for rank, waiting in ((0, first), *enumerate(others, start=2)):
            assert isinstance(waiting, tuple), waiting
            text, seconds = waiting
            assert text.startswith(f"RuntimeError: rank {rank} of mesh dimension 'ranks' got no answer"), text
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


def difference(rank: int, folder: Path) -> tuple[float, float]:
    """How far the logits of a model on two ranks are from those on one, and how large they are."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from blocksparse.hosts.transformers import attach

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun does
    model, tokens = tiny_llama(), torch.randint(260, (1, 200), generator=torch.Generator().manual_seed(0))
    pipeline = bs.pbs_attn(0.5, block=16, S=32)
    dense = model(tokens).logits
    with attach(model, pipeline, min_tokens=1):
        want = model(tokens).logits
    assert not torch.allclose(want, dense, atol=1e-3)
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    by_heads = DistributedConfig(tp_plan="auto")
    parallel = LlamaForCausalLM.from_pretrained(folder, distributed_config=by_heads).eval()
    assert parallel.model.layers[0].self_attn.k_proj.weight.to_local().shape == (16, 64)
    with attach(parallel, pipeline, min_tokens=1):
        got = parallel(tokens).logits
    return float((got - want).abs().max()), float(want.abs().max())


@pytest.mark.slow
def test_a_tensor_parallel_model_takes_the_same_attach(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    results = on_ranks(2, difference, tmp_path)
    assert all(isinstance(result, tuple) for result in results), "\n".join(map(str, results))
    for error, size in results:
        assert error < 1e-5 * size


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.parametrize(
    ("tokens", "ranks", "before", "at"), [(1000, 3, 0, 16), (777, 2, 100, 32), (64, 1, 5, 16)]
)
def test_cut_is_read_back_from_lengths(tokens: int, ranks: int, before: int, at: int, both_ends: bool) -> None:
    pieces = cut(tokens, ranks, before, at, both_ends=both_ends)
    everything = sorted(piece for its in pieces for piece in its)
    assert [everything[0].start, everything[-1].end] == [before, before + tokens]
    assert all(one.end == other.start and one.end % at == 0 for one, other in pairwise(everything))
    lengths = [sum(piece.length for piece in its) for its in pieces]
    assert (head_tail(lengths, before, at) if both_ends else in_order(lengths, before)) == pieces
    if not both_ends:
        assert max(lengths) - min(lengths) <= 2 * at


def test_head_and_tail_balance_causal_work() -> None:
    for its in cut(64 * 1024, 8, 0, 128, both_ends=True):
        assert sum((piece.start + piece.end) * piece.length for piece in its) == 64 * 1024 * 64 * 1024 // 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "keys", [Piece(0, 16), Piece(0, 64), Piece(16, 48), Piece(32, 96), Piece(64, 80), Piece(40, 44)]
)
def test_regions_cover_each_pair_once(keys: Piece, causal: bool) -> None:
    queries = Piece(32, 64)
    pairs = torch.zeros(100, 100, dtype=torch.int32)
    for region in regions(queries, keys, causal=causal):
        its = torch.ones(region.queries.length, region.keys.length, dtype=torch.int32)
        if region.causal:
            assert region.queries == region.keys
            its = its.tril()
        pairs[region.queries.start : region.queries.end, region.keys.start : region.keys.end] += its
    want = torch.zeros_like(pairs)
    want[queries.start : queries.end, keys.start : keys.end] = 1
    assert torch.equal(pairs, want.tril() if causal else want)


def test_heads_are_spread_by_their_loads() -> None:
    loads = [0.9, 0.1, 0.8, 0.2, 0.5, 0.5, 0.3, 0.7]
    heads = spread(loads, 4)
    assert sorted(head for its in heads for head in its) == list(range(8))
    assert [len(its) for its in heads] == [2] * 4
    assert max(sum(loads[head] for head in its) for its in heads) <= 1.01
    assert spread([0.5] * 4, 2) == [(0, 1), (2, 3)]
    assert spread([0.0, 0.0, 0.0, 1.0], 2) == [(3, 2), (0, 1)]  # the heaviest first


@pytest.mark.parametrize(
    ("kv_heads", "parts", "sizes"),
    [
        (4, 3, [1, 2, 1]),
        (4, 1, [4]),
        (4, 4, [1, 1, 1, 1]),
        (2, 3, [1, 1]),
        (8, 3, [3, 3, 2]),
        (5, 4, [1, 2, 1, 1]),
    ],
)
def test_the_first_and_the_last_part_are_the_small_ones(kv_heads: int, parts: int, sizes: list[int]) -> None:
    """Nothing is computed while the first part arrives, nor while the last one leaves."""
    every = shares(4 * kv_heads, 2 * kv_heads, 2, [1.0] * 4 * kv_heads, parts)
    for rank in (0, 1):
        assert [len(part[rank].keys) for part in every] == sizes
        assert sum((part[rank].keys for part in every), ()) == tuple(range(rank * kv_heads, (rank + 1) * kv_heads))
        assert [len(part[rank].queries) for part in every] == [2 * size for size in sizes]

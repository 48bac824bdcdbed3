"""Tables of kernels alone, block lists built beforehand: `rates`, `wide`, `blocks`, and the roofs over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.inputs import Case
from benchmarks.peers import DENSE, OURS, PORTABLE, SPARSE, DensePeer, Peer
from benchmarks.timing import Candidate, check, measure, medians, release

Row = dict[str, Any]


def rates(plan: Plan, device: torch.device, peers: Mapping[str, Peer] = SPARSE) -> Iterator[Row]:
    """Everyone on the same masks, by head dim, length and density; dense kernels too at density 1."""
    q_block, k_block = plan.blocks[0]
    for D in plan.head_dims:
        for N in plan.kernel_lengths:
            for density in plan.densities:
                case = Case(N, plan.Hq, plan.Hkv, D, q_block, k_block, density, plan.dtype)
                yield _rates_of(case, peers, DENSE if density == 1 else {}, device, plan.budget_ms)


def wide(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Our kernels by head dims of keys and values, on half the query heads; dense kernels too at density 1."""
    ours = {name: SPARSE[name] for name in (OURS, PORTABLE)}
    for D, Dv in plan.wide:
        for N in plan.kernel_lengths:
            for density in plan.wide_densities:
                case = Case(N, plan.Hq // 2, plan.Hkv, D, *plan.blocks[0], density, plan.dtype, Dv)
                yield _rates_of(case, ours, DENSE if density == 1 else {}, device, plan.budget_ms)


def blocks(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Our kernels on masks of finer blocks, where the kept area is the same but for the diagonal."""
    ours = {name: SPARSE[name] for name in (OURS, PORTABLE)}
    for D in plan.head_dims:
        for N in plan.kernel_lengths:
            for density in plan.block_densities:
                for q_block, k_block in plan.blocks:
                    case = Case(N, plan.Hq, plan.Hkv, D, q_block, k_block, density, plan.dtype)
                    yield _rates_of(case, ours, {}, device, plan.budget_ms)


def _rates_of(
    case: Case,
    peers: Mapping[str, Peer],
    dense: Mapping[str, DensePeer],
    device: torch.device,
    budget_ms: float,
) -> Row:
    release(device)
    q, k, v = case.inputs(device)
    mask = case.mask(q, k)
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    candidates = {name: Candidate(partial(peer, q, k, v, mask), verify) for name, peer in peers.items()}
    candidates |= {name: Candidate(partial(peer, q, k, v), verify) for name, peer in dense.items()}
    figures = measure(candidates, device=device, budget_ms=budget_ms)
    return {
        "N": case.N,
        "D": case.D,
        "Dv": v.shape[-1],
        "q_block": case.q_block,
        "k_block": case.k_block,
        "density": density_of(mask),
        "tflop": 2e-12 * (q.shape[-1] + v.shape[-1]) * pairs_kept(mask),
        # q, k, v and the output, once each
        "bytes": q.nbytes + k.nbytes + v.nbytes + q.nbytes // q.shape[-1] * v.shape[-1],
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


def pairs_kept(mask: bs.BlockMask) -> int:
    """Pairs of a query and a key in kept blocks, over all query heads; a short block counts as a whole one."""
    grid = mask.grid
    return int(mask.keep.sum()) * (grid.q_heads // mask.keep.shape[1]) * grid.q_block * grid.k_block


def density_of(mask: bs.BlockMask) -> float:
    """Mean of `BlockMask.density`, head by head: at 1M tokens all heads at once take 17 GB."""
    heads = mask.keep.shape[1]
    one_head = evolve(mask.grid, q_heads=1, kv_heads=1)  # the orders of keys are the same for all heads here
    per_head = (bs.BlockMask(mask.keep[:, h : h + 1], one_head).density().mean() for h in range(heads))
    return sum(float(x) for x in per_head) / heads


def roofs(device: torch.device) -> Row:
    """What the chip does at best, measured: a large bf16 matrix product, and a large copy (read plus written)."""
    if device.type != "cuda":
        return {}
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 28, device=device)
    copy = torch.empty_like(source)
    ms = medians({"matmul": lambda: a @ b, "copy": lambda: copy.copy_(source)}, device=device, budget_ms=150.0)
    matmul, moved = ms["matmul"].ms, ms["copy"].ms
    assert matmul is not None
    assert moved is not None
    return {"matmul_tflops": 2e-9 * 8192**3 / matmul, "memory_tb_per_s": 2e-9 * source.nbytes / moved}

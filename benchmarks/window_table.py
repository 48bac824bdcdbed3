"""The table `windows`: our kernels in layers that ask for a sliding window, attention sinks or a softcap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.inputs import Case
from benchmarks.kernel_tables import Row, density_of, pairs_kept
from benchmarks.peers import FLEX, OURS, PORTABLE, flex_call, kernel_call, portable_call
from benchmarks.timing import Candidate, attempt, check, measure, release

SOFTCAP, DENSITY = 30.0, 0.3


def windows(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Kernels alone, block lists built beforehand; beside them a plain mask with as many blocks in each row."""
    N, (q_block, k_block) = plan.kernel_lengths[0], plan.blocks[0]
    for D, Hq, Hkv in plan.layers:
        release(device)
        case = Case(N, Hq, Hkv, D, q_block, k_block, DENSITY, plan.dtype)
        q, k, v = case.inputs(device)
        plain = bs.AttentionSpec(scale=D**-0.5)
        sinks = bs.AttentionSpec(scale=D**-0.5, sinks=torch.randn(Hq, device=device))
        capped = bs.AttentionSpec(scale=D**-0.5, softcap=SOFTCAP)
        some = case.mask(q, k)
        same = f"{DENSITY:g} of the blocks"
        layers = [(same, None, some, plain), ("sinks, the same blocks", same, some, sinks)]
        layers.append(("softcap, the same blocks", same, some, capped))
        for window in plan.windows:
            seen = bs.AttentionSpec(scale=D**-0.5, window=window)
            mask = _everything(q, k, case, seen)
            most = int(mask.keep.sum(-1).max())
            layers.append((same := f"rows of {most} blocks", None, _last_blocks(q, k, case, most), plain))
            layers.append((f"window of {window}", same, mask, seen))
        for name, beside, mask, spec in layers:
            row = {
                "N": N,
                "D": D,
                "Hq": Hq,
                "Hkv": Hkv,
                "layer": name,
                "density": density_of(mask),
                "plain": beside,
            }
            yield attempt(row, partial(_rates, q, k, v, mask, spec, plan.budget_ms))


def _everything(q: Tensor, k: Tensor, case: Case, spec: bs.AttentionSpec) -> bs.BlockMask:
    """All that a layer sees."""
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), spec, q_block=case.q_block, k_block=case.k_block)
    return bs.BlockMask(grid.visible.expand(1, case.Hq, -1, -1), grid)


def _last_blocks(q: Tensor, k: Tensor, case: Case, count: int) -> bs.BlockMask:
    """The `count` blocks up to the diagonal, in a layer without a window."""
    whole = _everything(q, k, case, bs.AttentionSpec(scale=1.0))
    row, col = (torch.arange(size, device=q.device) for size in whole.keep.shape[2:])
    near = row[:, None] * case.q_block // case.k_block - col < count
    return bs.BlockMask(whole.keep & near, whole.grid)


def _rates(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, spec: bs.AttentionSpec, budget_ms: float) -> Row:
    verify = partial(check, q=q, k=k, v=v, mask=mask, spec=spec)
    peers = {OURS: kernel_call, PORTABLE: portable_call}
    if q.is_cuda:  # elsewhere it would be compiled for a minute, and the others are interpreted
        peers[FLEX] = flex_call
    candidates = {name: Candidate(partial(call, q, k, v, mask, spec=spec), verify) for name, call in peers.items()}
    figures = measure(candidates, device=q.device, budget_ms=budget_ms)
    return {
        "tflop": 2e-12 * (q.shape[-1] + v.shape[-1]) * pairs_kept(mask),
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }

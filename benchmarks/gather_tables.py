"""The table `gather`: keys loaded through index maps, without a stop, against contiguous tiles of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.kernel_tables import Row, pairs_kept
from benchmarks.peers import OURS, kernel_call
from benchmarks.timing import Call, Candidate, CannotRunError, attempt, check, measure, release
from blocksparse.kernels.attention.gather_attention import gather_attention
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.select.top_k import visiting_order

Op = Callable[..., tuple[Tensor, Tensor, Tensor]]

GATHER, PORTABLE_GATHER, WHOLE = "gather", "portable gather", "GatherExecutor"


def gather(plan: Plan, device: torch.device) -> Iterator[Row]:
    """As many blocks in every row of blocks: through maps per KV head and per query head, and side by side."""
    for N in plan.kernel_lengths:
        for density in plan.gather_densities:
            for maps in (plan.Hkv, plan.Hq):
                yield attempt({"N": N, "maps": maps}, partial(_row_of, plan, N, density, maps, device))


def _row_of(plan: Plan, N: int, density: float, maps: int, device: torch.device) -> Row:
    release(device)
    block = plan.blocks[0][0]
    q, k, v = (
        torch.randn(1, H, N, plan.D, device=device, dtype=plan.dtype) for H in (plan.Hq, plan.Hkv, plan.Hkv)
    )
    width = block * prefix_blocks(N, plan.segment, block, density)
    permutation = random_maps(N, maps, plan.segment, width, device)
    scores = bs.NoScorer(block)(q, k, permutation, bs.AttentionSpec(scale=plan.D**-0.5))
    mask = bs.Ranked(bs.Everything())(scores)
    beside = scattered(q, k, mask)
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    figures = measure(
        {
            OURS: Candidate(partial(kernel_call, q, k, v, beside), partial(check, q=q, k=k, v=v, mask=beside)),
            GATHER: Candidate(partial(gather_call, gather_attention, q, k, v, mask), verify),
            PORTABLE_GATHER: Candidate(partial(portable_gather_call, q, k, v, mask), verify),
            WHOLE: Candidate(partial(executor_call, q, k, v, permutation, mask), verify),
        },
        device=device,
        budget_ms=plan.budget_ms,
    )
    return {
        "D": plan.D,
        "S": plan.segment,
        "block": block,
        "density": float(beside.density().mean()),
        "tflop": 4e-12 * plan.D * pairs_kept(beside),
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


def prefix_blocks(N: int, S: int, block: int, density: float) -> int:
    """Blocks of earlier keys in a map, so that the density, own segments included, is nearest to the one given."""
    rows, own = N // block, S // block
    wanted = density * rows * (rows + 1) / 2 - rows * (own + 1) / 2
    return min(
        range(1, rows + 1), key=lambda width: abs(sum(own * min(g, width) for g in range(0, rows, own)) - wanted)
    )


def random_maps(N: int, maps: int, S: int, width: int, device: torch.device) -> bs.Permutation:
    """Maps as `GlobalIndexMap` makes them, `[1, maps, N / S, S + width]`, but of any earlier keys in any order."""
    index = torch.full((1, maps, N // S, S + width), -1, device=device, dtype=torch.int32)
    for g in range(N // S):
        index[:, :, g, :S] = torch.arange(g * S, (g + 1) * S, device=device, dtype=torch.int32)
        some = torch.rand(maps, g * S, device=device).argsort(-1)[:, :width]
        index[0, :, g, S : S + some.shape[-1]] = some.int()
    return bs.Permutation(index, group=S)


def scattered(q: Tensor, k: Tensor, mask: bs.BlockMask) -> bs.BlockMask:
    """A mask in original order with as many blocks in each row as `mask`: the diagonal and random earlier ones."""
    sizes, count = mask.grid, mask.keep.sum(-1, keepdim=True)
    grid = bs.Grid.of(
        q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=1.0), q_block=sizes.q_block, k_block=sizes.k_block
    )
    turn = torch.rand(*mask.keep.shape[:3], grid.cols, device=q.device)
    order = turn.masked_fill(grid.diagonal, 2.0).masked_fill(~grid.visible, -1.0).argsort(-1, descending=True)
    first = torch.arange(grid.cols, device=q.device) < count
    return bs.BlockMask(torch.zeros_like(first).scatter_(-1, order, first) & grid.visible, grid)


def gather_call(op: Op, q: Tensor, k: Tensor, v: Tensor, mask: bs.RankedBlockMask) -> Call:
    """The kernel alone, blocks put in order beforehand as `GatherExecutor(tau=0)` does."""
    _refuse_unsupported(q, k, v, mask)
    grid, keep = mask.grid, mask.per_query_head()
    rule = StopRule(torch.zeros(q.shape[1], device=q.device), patience=1, commit=True, mean=False)
    lists = RankedLists(*visiting_order(keep, mask.rank, rule.tau), grid.q_block, grid.k_block)
    run = partial(op, q, k, v, lists, grid.positions, rule, scale=q.shape[-1] ** -0.5)
    return lambda: run()[0]


def portable_gather_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.RankedBlockMask) -> Call:
    """The kernel for any GPU that Triton compiles for, also where there is a faster one."""
    from blocksparse.kernels.attention.gather_attention_triton import gather_attention_triton
    from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted

    if not q.is_cuda and not runs_interpreted():
        raise CannotRunError("Triton compiles for GPUs")
    return gather_call(gather_attention_triton, q, k, v, mask)


def executor_call(q: Tensor, k: Tensor, v: Tensor, permutation: bs.Permutation, mask: bs.RankedBlockMask) -> Call:
    """`GatherExecutor(tau=0)`, the order of blocks included."""
    executor, scale = bs.GatherExecutor(tau=0.0), q.shape[-1] ** -0.5
    return lambda: executor(q, k, v, mask, bs.AttentionSpec(scale=scale)).out


def _refuse_unsupported(q: Tensor, k: Tensor, v: Tensor, mask: bs.RankedBlockMask) -> None:
    if reasons := bs.GatherExecutor().unsupported(q, k, v, mask, bs.AttentionSpec(scale=q.shape[-1] ** -0.5)):
        raise CannotRunError("; ".join(reasons))

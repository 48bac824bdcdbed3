"""SubBlock, and DFSAttn, against readings of their definitions (SGLang's router; arXiv 2605.23445)."""

from __future__ import annotations

import math

import torch
from attrs import evolve
from tests.papers.readings import Small, check, small, some_cases, top
from torch import Tensor

import blocksparse as bs

CELL = 2


def cells(case: Small) -> tuple[Tensor, Tensor]:
    """The mean query and the mean key of every cell, `[B, Hq, cells, D]`."""
    return tuple(torch.stack([part.mean(2) for part in x.split(CELL, dim=2)], 2) for x in (case.q, case.keys))  # type: ignore[return-value]


def summed(x: Tensor, per_block: int, axis: int) -> Tensor:
    return torch.stack([part.sum(axis) for part in x.split(per_block, dim=axis)], axis)


def subblock(case: Small) -> Tensor:
    queries, keys = cells(case)
    logits = case.scale * queries @ keys.mT
    weight = (logits - logits.amax((2, 3), keepdim=True)).exp()
    score = summed(summed(weight, 4, 2), 4, 3)
    return top(score, math.ceil(0.25 * score.shape[3]))


def dfs_attn(case: Small) -> Tensor:
    queries, keys = cells(case)
    score = summed(summed((case.scale * queries @ keys.mT).softmax(-1), 4, 2), 4, 3)
    return top(score, math.ceil(0.3 * score.shape[3]))


@some_cases
def test_subblock(cases: range) -> None:
    preset = bs.subblock(0.25, cell=CELL, block=8, executor=bs.ReferenceExecutor())
    check(preset, subblock, (small(i, causal=False) for i in cases))


@some_cases
def test_dfs_attn(cases: range) -> None:
    preset = bs.dfs_attn(0.3, cell=CELL, block=8, executor=bs.ReferenceExecutor())
    check(preset, dfs_attn, (small(i, causal=False) for i in cases))


def test_a_budget_per_head() -> None:
    case = small(2, causal=False, N=64)
    shares = [0.2, 0.7, 0.4, 0.9][: case.q.shape[1]]
    keep = bs.subblock(shares, cell=4, block=8).choose(case.q, case.k, causal=False).mask.keep
    for head, share in enumerate(shares):
        alone = bs.subblock(share, cell=4, block=8).choose(case.q, case.k, causal=False).mask.keep
        assert torch.equal(keep[:, head], alone[:, head])
        assert int(keep[0, head, 0].sum()) == -(-8 * shares[head] // 1)


def test_along_a_curve() -> None:
    """With an order, as DFSAttn has it, the cells are those of the tokens in that order."""
    order = bs.HilbertOrder((2, 4, 8))
    for seed in range(5):
        case = small(seed, causal=False, N=64)
        place = order.cells("cpu")
        moved = evolve(case, q=case.q[:, :, place], k=case.k[:, :, place], v=case.v[:, :, place])
        for preset, its in ((bs.subblock, subblock), (bs.dfs_attn, dfs_attn)):
            pipeline = preset(cell=CELL, block=8, order=order, executor=bs.ReferenceExecutor())
            assert torch.equal(pipeline.trace(case.q, case.k, case.v, causal=False).mask.keep, its(moved))


def test_sums_that_are_not_normalised_weigh_cells_by_their_weights() -> None:
    """A cell of queries with large logits outweighs one that looks elsewhere with small ones."""
    q = torch.tensor([[[[8.0, 0.0]], [[0.0, 1.0]]]]).view(1, 1, 2, 2)
    k = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]])
    spec = bs.AttentionSpec(scale=1.0, causal=False)
    mass = [
        bs.AntidiagonalScorer(1, block=2, pattern="sum", normalize=normalize)(q, k, bs.GlobalPermutation(), spec)
        for normalize in (True, False)
    ]
    assert 0.7 < float(mass[0].values[0, 0, 0, 1]) < 0.8  # of 2
    assert float(mass[1].values[0, 0, 0, 1]) < 0.01  # of 1


def test_causal_chunks_choose_as_the_whole() -> None:
    for preset in (bs.subblock, bs.dfs_attn):
        pipeline = preset(cell=CELL, block=8, executor=bs.ReferenceExecutor())
        for seed in range(10):
            case = small(seed, causal=True, N=60)
            if case.offset == 0:
                whole, chunk = (pipeline.trace(q, case.k, case.v).mask.keep for q in (case.q, case.q[:, :, 24:]))
                assert torch.equal(chunk, whole[:, :, 3:])

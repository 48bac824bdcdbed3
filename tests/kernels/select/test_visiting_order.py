"""Ranks as lists: the count of each block's predecessors against a stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.select.top_k import visiting_order

pytest.importorskip("triton")
from blocksparse.kernels.select.top_k_triton import visiting_order_triton


def assert_same(keep: Tensor, rank: Tensor, tau: Tensor) -> None:
    want = visiting_order.reference(keep, rank, tau)
    for compute in (visiting_order_triton, visiting_order):
        for ours, its in zip(compute(keep, rank, tau), want, strict=True):
            assert ours.dtype == torch.int32
            assert torch.equal(ours, its)


@pytest.mark.parametrize("cols", [1, 15, 16, 33, 130])
def test_kernel_and_reference(cols: int, device: str) -> None:
    generator = torch.Generator().manual_seed(cols)
    shape = 2, 2, 3, cols
    keep = (torch.rand(shape, generator=generator) < 0.6).to(device)
    keep[:, :, 1] = False  # a row with nothing kept
    tau = torch.tensor([0.0, 0.5], device=device)
    distinct = torch.rand(shape, generator=generator).argsort(-1).int() - cols // 2
    few = torch.randint(-2, 3, shape, generator=generator, dtype=torch.int32)
    extreme = torch.where(few > 0, torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min)
    for rank in (distinct, few, extreme.int()):
        assert_same(keep, rank.to(device), tau)


def test_layouts(device: str) -> None:
    """Heads that share one choice, and ranks whose rows are not consecutive in memory."""
    keep = (torch.rand(1, 1, 4, 20) < 0.5).to(device).expand(2, 3, -1, -1)
    rank = torch.randint(-9, 9, (2, 3, 20, 4), dtype=torch.int32, device=device).mT
    assert_same(keep, rank, torch.zeros(6, device=device)[::2])


def test_kept_blocks_come_first_whatever_their_rank(device: str) -> None:
    keep = torch.eye(4, dtype=torch.bool, device=device).expand(1, 1, 4, 4)
    rank = torch.full((1, 1, 4, 4), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)
    for compute in (visiting_order_triton, visiting_order.reference):
        index, _, _ = compute(keep, rank, torch.tensor([0.5], device=device))
        assert index[0, 0, :, 0].tolist() == [0, 1, 2, 3]

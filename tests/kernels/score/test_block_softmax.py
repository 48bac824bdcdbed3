"""Softmax over blocks and over prefixes: the kernel against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.score.block_softmax import block_softmax, prefix_softmax
from tests.kernels.block_grids import KINDS, heads_of, make_grid

pytest.importorskip("triton")
from blocksparse.kernels.score import block_softmax_triton as kernel


def random_logits(grid: bs.Grid, device: str) -> Tensor:
    return torch.randn(heads_of(grid), generator=torch.Generator().manual_seed(0)).to(device) * 20


def assert_right(logits: Tensor, grid: bs.Grid, segment: int | None = None) -> None:
    want, want_own = block_softmax.reference(logits.double(), grid, scale=0.3, segment=segment)
    for compute in (kernel.block_softmax_triton, block_softmax):
        mass, own = compute(logits.clone(), grid, scale=0.3, segment=segment)
        assert mass.dtype == torch.float32
        torch.testing.assert_close(mass, want.float(), rtol=1e-5, atol=1e-7)
        assert torch.equal(mass == 0, want.float() == 0)
        assert (own is None) == (want_own is None)
        if own is not None and want_own is not None:
            assert torch.equal(own, want_own)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_reference(kind: str, device: str) -> None:
    grid = make_grid(kind, device)
    assert_right(random_logits(grid, device), grid)


@pytest.mark.parametrize("kind", ["in order", "chunk", "sorted", "per query head", "one block"])
def test_own_segment_left_out(kind: str, device: str) -> None:
    """Rows of the first segment hold nothing then: zeros."""
    grid = make_grid(kind, device)
    assert_right(random_logits(grid, device), grid, segment=64)


def test_rows_in_several_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel, "_MOST", 64)
    grid = make_grid("wide", device)
    assert_right(random_logits(grid, device), grid)
    assert_right(random_logits(grid, device), grid, segment=64)


def test_infinite_logits(device: str) -> None:
    grid = make_grid("in order", device)
    logits = random_logits(grid, device)
    logits[:, 0] = -float("inf")
    logits[:, 1, :, ::2] = -float("inf")
    assert_right(logits, grid)


@pytest.mark.parametrize("tile", [32, 8192])
def test_prefixes(tile: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel, "_MOST", tile)
    logits = torch.randn(2, 3, 5, 100, generator=torch.Generator().manual_seed(0)).to(device)
    for seen in (
        torch.arange(0, 125, 25, device=device).view(1, 1, 5, 1),
        torch.full((2, 3, 1, 1), 64, device=device),
    ):
        want = prefix_softmax.reference(logits.double(), seen)
        for compute in (kernel.prefix_softmax_triton, prefix_softmax):
            torch.testing.assert_close(compute(logits.clone(), seen), want.float(), rtol=1e-5, atol=1e-7)

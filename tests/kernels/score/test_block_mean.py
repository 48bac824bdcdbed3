"""Means and self-similarities of blocks against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.score.block_mean import block_mean, block_similarity
from blocksparse.kernels.score.block_mean_triton import (
    block_mean_triton,
    block_means_triton,
    block_similarity_triton,
)


def tokens(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check(x: Tensor, block: int, *, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None) -> None:
    exact = block_mean.reference(x.double(), block, lead, padded_tail, index)
    got = block_mean_triton(x, block, lead, padded_tail, index)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-6)
    for centred in (False, True):
        alike = block_similarity.reference(x.double(), block, lead, centred, index)
        got = block_similarity_triton(x, block, lead, centred, index)
        torch.testing.assert_close(got.double(), alike, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "block", "lead"),
    [
        *((N, 64, 0) for N in (1, 63, 65, 127, 129, 200, 1000)),
        *((N, 16, lead) for N in (3, 12, 40) for lead in (0, 5, 15)),
        (9, 1, 0),
    ],
)
@pytest.mark.parametrize("padded_tail", [False, True])
def test_lengths_and_chunks(N: int, block: int, lead: int, padded_tail: bool, device: str) -> None:
    check(tokens(2, 2, N, 16, device=device), block, lead=lead, padded_tail=padded_tail)


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 7, 80, 96, 128, 256])
@pytest.mark.parametrize("block", [24, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims_and_blocks(D: int, block: int, dtype: torch.dtype, device: str) -> None:
    check(tokens(1, 1, 150, D, device=device, dtype=dtype), block)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3])
def test_index_maps(group: int, device: str) -> None:
    """One map per KV head or per query head, and layouts as hosts have them."""
    x = tokens(2, 50, 2, 32, device=device).transpose(1, 2)
    index = tokens(2, 2 * group, 50, device=device, seed=1).argsort(-1).int()
    check(x, 16, index=index)
    check(x, 16, index=index[:1, :1].expand(2, 2 * group, 50), lead=3)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_infinite_and_undefined_tokens(device: str) -> None:
    """They spoil their own block and no other; tokens of zeros are like nothing."""
    x = tokens(1, 1, 70, 16, device=device)
    x[0, 0, 3, 2], x[0, 0, 40, 1], x[0, 0, 64:] = float("nan"), float("inf"), 0.0
    for got, exact in (
        (block_mean_triton(x, 16, 0, False, None), block_mean.reference(x, 16, 0, False, None)),
        (block_similarity_triton(x, 16, 0, False, None), block_similarity.reference(x, 16, 0, False, None)),
    ):
        torch.testing.assert_close(got, exact, equal_nan=True)


def test_similarity_never_rounds_over_one(device: str) -> None:
    x = tokens(1, 200, 1, 7, device=device).expand(-1, -1, 12, -1)
    alike = block_similarity_triton(x, 12, 0, False, None)
    assert float(alike.max()) == 1.0
    assert float(alike.min()) > 1 - 1e-6


@pytest.mark.parametrize("mapped", ["neither", "queries", "keys"])
@pytest.mark.parametrize("padded_tail", [False, True])
def test_queries_and_keys_in_one_launch(mapped: str, padded_tail: bool, device: str) -> None:
    """Bit for bit what a launch for each gives: blocks and heads differ, and a chunk starts inside a block."""
    q, k = tokens(2, 4, 37, 24, device=device), tokens(2, 50, 2, 24, device=device, seed=1).transpose(1, 2)
    q_index = k_index = None
    if mapped == "queries":
        q_index = tokens(2, 4, 37, device=device, seed=2).argsort(-1).int()
    if mapped == "keys":
        k_index = tokens(2, 4, 50, device=device, seed=3).argsort(-1).int()
    got = block_means_triton(q, k, 16, 8, 13, padded_tail, q_index, k_index)
    assert torch.equal(got[0], block_mean_triton(q, 16, 13, padded_tail, q_index))
    assert torch.equal(got[1], block_mean_triton(k, 8, 0, padded_tail, k_index))

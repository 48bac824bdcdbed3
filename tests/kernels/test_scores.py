"""Means, softmax, gates and divergence of blocks: kernels against references, in float64 where sums are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.score.block_mean import block_mean, block_means, block_similarity
from blocksparse.kernels.score.block_softmax import block_divergence, block_softmax, gate_blocks, prefix_softmax
from tests.kernels.block_grids import KINDS, heads_of, make_grid
from tests.kernels.compare import assert_near, draws, order, randn

pytest.importorskip("triton")
from blocksparse.kernels.score import block_softmax_triton as kernel
from blocksparse.kernels.score.block_mean_triton import block_mean_triton, block_similarity_triton

slow = pytest.mark.slow

# Means and similarities


def assert_means(x: Tensor, block: int, *, lead: int = 0, padded_tail: bool = False, index: Any = None) -> None:
    assert_near(block_mean, x, block, lead, padded_tail, index, rtol=1e-5, atol=2e-6)
    for centred in (False, True):
        assert_near(block_similarity, x, block, lead, centred, index, rtol=1e-5, atol=2e-6)


@slow
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
    assert_means(randn(2, 2, N, 16, device=device), block, lead=lead, padded_tail=padded_tail)


@slow
@pytest.mark.parametrize("D", [1, 7, 80, 96, 128, 256])
@pytest.mark.parametrize("block", [24, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims_and_blocks(D: int, block: int, dtype: torch.dtype, device: str) -> None:
    assert_means(randn(1, 1, 150, D, device=device, dtype=dtype), block)


@slow
@pytest.mark.parametrize("group", [1, 3])
def test_index_maps(group: int, device: str) -> None:
    """One map per KV head or per query head, and layouts as hosts have them."""
    x, index = randn(2, 50, 2, 32, device=device).transpose(1, 2), order(2, 2 * group, 50, device=device)
    assert_means(x, 16, index=index)
    assert_means(x, 16, index=index[:1, :1].expand(2, 2 * group, 50), lead=3)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_infinite_and_undefined_tokens(device: str) -> None:
    """They spoil their own block and no other; tokens of zeros are like nothing."""
    x = randn(1, 1, 70, 16, device=device)
    x[0, 0, 3, 2], x[0, 0, 40, 1], x[0, 0, 64:] = float("nan"), float("inf"), 0.0
    for operation in (block_mean, block_similarity):
        assert_near(operation, x, 16, 0, False, None, rtol=1e-6, atol=1e-5)


def test_similarity_never_rounds_over_one(device: str) -> None:
    x = randn(1, 200, 1, 7, device=device).expand(-1, -1, 12, -1)
    for compute in (block_similarity_triton, block_similarity.reference):
        alike = compute(x, 12, 0, False, None)
        assert float(alike.max()) == 1.0
        assert float(alike.min()) > 1 - 1e-6


@pytest.mark.parametrize("mapped", ["neither", "queries", "keys"])
@pytest.mark.parametrize("padded_tail", [False, True])
def test_queries_and_keys_in_one_launch(mapped: str, padded_tail: bool, device: str) -> None:
    """Bit for bit what a launch for each gives: blocks and heads differ, and a chunk starts inside a block."""
    q, k = randn(2, 4, 37, 24, device=device), randn(2, 50, 2, 24, device=device, seed=1).transpose(1, 2)
    q_index = order(2, 4, 37, device=device) if mapped == "queries" else None
    k_index = order(2, 4, 50, device=device) if mapped == "keys" else None
    got = block_means.kernel()(q, k, 16, 8, 13, padded_tail, q_index, k_index)
    assert torch.equal(got[0], block_mean_triton(q, 16, 13, padded_tail, q_index))
    assert torch.equal(got[1], block_mean_triton(k, 8, 0, padded_tail, k_index))


# Softmax over blocks and over prefixes


def assert_softmax(logits: Tensor, grid: bs.Grid, segment: int | None = None) -> None:
    want, want_own = block_softmax.reference(logits.double(), grid, scale=0.3, segment=segment)
    for compute in (kernel.block_softmax_triton, block_softmax):
        mass, own = compute(logits.clone(), grid, scale=0.3, segment=segment)
        torch.testing.assert_close(mass, want.float(), rtol=1e-5, atol=1e-7)
        assert torch.equal(mass == 0, want.float() == 0)
        assert (own is None) == (want_own is None)
        if own is not None and want_own is not None:
            assert torch.equal(own, want_own)


@pytest.mark.parametrize("kind", KINDS)
def test_softmax(kind: str, device: str) -> None:
    """Rows of the first segment hold nothing where the own segment is left out: zeros."""
    grid = make_grid(kind, device)
    logits = 20 * randn(*heads_of(grid), device=device)
    assert_softmax(logits, grid)
    if kind in ("in order", "chunk", "sorted", "per query head", "one block"):
        assert_softmax(logits, grid, segment=64)


def test_softmax_of_rows_in_several_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel, "_MOST", 64)
    grid = make_grid("wide", device)
    for segment in (None, 64):
        assert_softmax(20 * randn(*heads_of(grid), device=device), grid, segment)


def test_infinite_logits(device: str) -> None:
    grid = make_grid("in order", device)
    logits = 20 * randn(*heads_of(grid), device=device)
    logits[:, 0] = logits[:, 1, :, ::2] = -float("inf")
    assert_softmax(logits, grid)


@pytest.mark.parametrize("tile", [32, 8192])
def test_prefixes(tile: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel, "_MOST", tile)
    logits = randn(2, 3, 5, 100, device=device)
    by_row = torch.arange(0, 125, 25, device=device).view(1, 1, 5, 1)
    for seen in (by_row, torch.full((2, 3, 1, 1), 64, device=device)):
        want = prefix_softmax.reference(logits.double(), seen)
        for compute in (kernel.prefix_softmax_triton, prefix_softmax):
            torch.testing.assert_close(compute(logits.clone(), seen), want.float(), rtol=1e-5, atol=1e-7)


# Gates and divergence


@pytest.mark.parametrize("with_forced", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gates(kind: str, with_forced: bool, device: str) -> None:
    grid = make_grid(kind, device)
    B, H, rows, cols = heads_of(grid)
    generator = draws()

    def some(*shape: int) -> Tensor:
        x = torch.rand(*shape, generator=generator)
        x.view(-1)[::7] = float("nan")
        x.view(-1)[3::7] = 0.25  # as much as a threshold
        return x.to(device)

    forced = (some(1, H, rows, cols) < 0.3) if with_forced else None
    per_head = torch.rand(1, H, 1, 1, dtype=torch.float64, generator=generator).to(device)
    same: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for heads, theta, more in ((H, 0.25, 0), (1, 0.25, 1), (H, per_head, 0), (1, per_head[:, :1], 0)):
        values = some(B, H, rows, cols + more)[..., :cols]
        given, of_q, of_k = values.clone(), some(B, H, rows), some(B, heads, cols)
        want = gate_blocks.reference(values, of_q, of_k, theta, forced, grid)
        got = gate_blocks.kernel()(values, of_q, of_k, theta, forced, grid)
        torch.testing.assert_close(values, given, **same)  # an inner scorer may keep its own
        torch.testing.assert_close(got[0], want[0], **same)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("cols", [1, 7, 64, 300])
def test_divergence(cols: int, device: str) -> None:
    logits, true = 20 * randn(2, 3, cols), randn(2, 3, cols, seed=1).softmax(-1)
    logits[:, 1, cols // 2 + 1 :] = float("-inf")
    true[:, 2, : cols // 2] = 0.0
    got = block_divergence.kernel()(logits.to(device), true.to(device))
    want = block_divergence.reference(logits.double(), true.double())
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=1e-5, atol=1e-3
    )  # near 0 the root of a rounding error


def test_nan_is_not_near(device: str) -> None:
    logits, true = torch.zeros(1, 2, 20, device=device), torch.full((1, 2, 20), 0.05, device=device)
    logits[:, 1, 3] = float("nan")
    assert block_divergence.kernel()(logits, true).isnan().tolist() == [[False, True]]

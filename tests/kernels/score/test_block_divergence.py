"""Divergence of weights of blocks: the Triton kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.score.block_softmax import block_divergence

pytest.importorskip("triton")
from blocksparse.kernels.score.block_softmax_triton import block_divergence_triton


@pytest.mark.parametrize("cols", [1, 7, 64, 300])
def test_kernel_and_reference(cols: int, device: str) -> None:
    generator = torch.Generator().manual_seed(cols)
    logits = 20 * torch.randn(2, 3, cols, generator=generator)
    true = torch.randn(2, 3, cols, generator=generator).softmax(-1)
    logits[:, 1, cols // 2 + 1 :] = float("-inf")
    true[:, 2, : cols // 2] = 0.0
    got = block_divergence_triton(logits.to(device), true.to(device))
    want = block_divergence.reference(logits.double(), true.double())
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=1e-5, atol=1e-3
    )  # the root of a rounding error near 0


def test_nan_is_not_near(device: str) -> None:
    logits, true = torch.zeros(1, 2, 20, device=device), torch.full((1, 2, 20), 0.05, device=device)
    logits[:, 1, 3] = float("nan")
    got = block_divergence_triton(logits, true)
    assert got.isnan().tolist() == [[False, True]]

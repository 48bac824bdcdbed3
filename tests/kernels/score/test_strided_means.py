"""Means of cells: the Triton kernel against the reference, bit by bit, and the reference against float64."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.score.strided_means import strided_mean, strided_means
from blocksparse.kernels.score.strided_means_triton import strided_mean_triton, strided_means_triton
from blocksparse.testing import make_qkv
from tests.machine import DTYPES


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.slow), *DTYPES[1:]], ids=str)
@pytest.mark.parametrize(
    ("slots", "lead", "N", "D"), [(4, 3, 61, 16), (8, 0, 64, 24), (16, 5, 9, 16), (40, 0, 85, 8), (1, 0, 5, 16)]
)
@pytest.mark.parametrize("padded_tail", [False, True])
def test_the_kernel_gives_the_bits_of_its_reference(
    padded_tail: bool, slots: int, lead: int, N: int, D: int, dtype: torch.dtype, device: str
) -> None:
    M = max(N - 2, 1)
    q, k, _ = make_qkv(B=2, Hq=4, Hkv=2, N=N, M=M, D=D, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    moved = {
        "q_index": torch.rand(2, 4, M, generator=generator).argsort(-1).int().to(device),
        "k_index": torch.rand(2, 4, N, generator=generator).argsort(-1).int().to(device),
    }
    for order in ({"q_index": None, "k_index": None}, moved):
        got = strided_means_triton(q, k, slots, lead, padded_tail, **order)
        want = (
            strided_mean.reference(q.cpu(), slots, lead, padded_tail, _cpu(order["q_index"])),
            strided_mean.reference(k.cpu(), slots, 0, padded_tail, _cpu(order["k_index"])),
        )
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a.cpu(), b)
        assert torch.equal(strided_mean_triton(q, slots, lead, padded_tail, order["q_index"]), got[0])
        assert torch.equal(strided_mean_triton(k, slots, 0, padded_tail, order["k_index"]), got[1])


def _cpu(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_means_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=45, M=38, D=8, dtype=dtype)
    for x, got, lead in zip((q, k), strided_means(q, k, 8, lead=3), (3, 0), strict=True):
        cells = x.double().split([8 - lead, *[8] * ((x.shape[2] - 8 + lead) // 8), (x.shape[2] + lead) % 8], dim=2)
        want = torch.stack([cell.mean(2) for cell in cells if cell.shape[2]], dim=2)
        assert got.dtype == dtype
        # Half of the last place, and what sums in fp32 lose.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=1e-7)

"""Weights of the last queries by block and band: the Triton kernels against sums of the reference in float64."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.gemm.products import run_sums
from blocksparse.kernels.score import last_queries_triton
from blocksparse.kernels.score.last_queries import last_query_weights
from blocksparse.testing import make_qkv
from tests.machine import DTYPES


def assert_right(q: torch.Tensor, k: torch.Tensor, P: int, run: int) -> None:
    last_q, scale = 4 * q[:, :, -P:], q.shape[-1] ** -0.5
    assert last_queries_triton.takes_sums(last_q, run)
    got = last_queries_triton.last_query_sums_triton(last_q, k, scale, run)
    want = last_query_weights.reference(last_q.double(), k.double(), q.shape[2], True, scale)
    for ours, lines in zip(got, want, strict=True):
        exact = run_sums.reference(lines, run)
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(ours.double().sum(-1), torch.ones_like(exact[..., 0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("N", "P"), [(1, 1), (63, 16), (64, 16), (83, 16), (160, 16), (161, 16), (175, 9), (170, 16)]
)
def test_lengths(N: int, P: int, dtype: torch.dtype, device: str) -> None:
    """Bands cross tiles at every offset: two of them in a tile, or three."""
    q, k, _ = make_qkv(N=N, Hq=2, Hkv=1, D=32, dtype=dtype, device=device)
    assert_right(q, k, P, 16)


@pytest.mark.parametrize("offset", range(16))
def test_offsets(offset: int, device: str) -> None:
    q, k, _ = make_qkv(N=96 + offset, Hq=1, Hkv=1, D=16, device=device)
    for P in (16, 11, 2):
        assert_right(q, k, P, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "run"), [(3, 1, 80, 64), (8, 2, 128, 128), (7, 1, 96, 128), (2, 2, 256, 64)]
)
def test_heads(Hq: int, Hkv: int, D: int, run: int, device: str) -> None:
    """Batches and groups of heads, in chunks, with strides; more tiles than one program has."""
    q, _, _ = make_qkv(B=2, N=200, Hq=Hq, Hkv=Hkv, D=D, dtype=torch.float16, device=device)
    k = make_qkv(B=2, N=10 * run + 7, Hq=Hq, Hkv=Hkv, D=D, dtype=torch.float16, device=device, seed=1)[1]
    assert_right(
        q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(1, 2).contiguous().transpose(1, 2), run, run
    )


def test_great_logits(device: str) -> None:
    """A row whose weight lies on one key of one tile: the others underflow."""
    q, k, _ = make_qkv(N=80, Hq=1, Hkv=1, D=16, device=device)
    assert_right(100 * q, k, 16, 16)


def test_what_is_refused(device: str) -> None:
    q, _, _ = make_qkv(N=80, Hq=1, Hkv=1, D=16, device=device)
    assert not last_queries_triton.takes_sums(q, 16)  # more queries than a run has keys
    assert not last_queries_triton.takes_sums(q[:, :, :10], 48)
    assert not last_queries_triton.takes_sums(q[:, :, :10].double(), 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["key", "query"])
def test_what_is_not_finite_spoils_the_same_sums(where: str, value: float, device: str) -> None:
    """A query that sees it has no weights at all, as in plain torch, and not those of its other keys alone."""
    q, k, _ = make_qkv(N=90, Hq=4, Hkv=2, D=16, device=device)
    (k if where == "key" else q)[0, 0, 87] = value
    got = last_queries_triton.last_query_sums_triton(q[:, :, -10:], k, 0.25, 16)
    for ours, lines in zip(got, last_query_weights.reference(q[:, :, -10:], k, 90, True, 0.25), strict=True):
        its = run_sums.reference(lines, 16)
        assert its.isnan().any(-1).tolist() == [[True, where == "key", False, False]]
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-7, equal_nan=True)

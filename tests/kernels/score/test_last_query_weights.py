"""Weights of the last queries by key and distance: the Triton kernels against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from blocksparse.kernels.score import last_queries_triton
from blocksparse.kernels.score.last_queries import last_query_weights
from blocksparse.testing import make_qkv
from tests.machine import DTYPES


def assert_right(q: torch.Tensor, k: torch.Tensor, P: int, *, causal: bool) -> None:
    last_q, scale = 4 * q[:, :, -P:], q.shape[-1] ** -0.5
    got = last_queries_triton.last_query_weights_triton(last_q, k, q.shape[2], causal, scale)
    want = last_query_weights.reference(last_q.double(), k.double(), q.shape[2], causal, scale)
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 63, 129, 1000])
def test_lengths(N: int, dtype: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(N=N, Hq=2, Hkv=1, D=32, dtype=dtype, device=device)
    assert_right(q, k, min(N, 64), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "P"), [(83, 83, 1), (60, 83, 60), (90, 200, 10), (150, 150, 128), (200, 60, 20)]
)
def test_numbers_of_queries(M: int, N: int, P: int, causal: bool, device: str) -> None:
    if causal and M > N:
        pytest.skip("no such call")
    q = make_qkv(B=2, N=M, Hq=4, Hkv=2, D=16, device=device)[0]
    k = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=16, device=device, seed=1)[1]
    assert_right(q, k, P, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(3, 1, 80), (8, 2, 64), (7, 1, 96), (1, 1, 128), (2, 2, 256)])
def test_heads(Hq: int, Hkv: int, D: int, device: str) -> None:
    q, k, _ = make_qkv(N=70, Hq=Hq, Hkv=Hkv, D=D, device=device)
    assert_right(q, k, 16, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16, 64])
def test_diagonals_that_cross_many_tiles(keys: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory on chip is small, there are fewer keys in a tile than last queries."""
    options = last_queries_triton.launch_options
    monkeypatch.setattr(last_queries_triton, "launch_options", lambda *x: {**options(*x), "BLOCK_N": keys})
    q, k, _ = make_qkv(N=170, Hq=2, Hkv=1, D=16, device=device)
    for causal in (True, False):
        assert_right(q, k, 100, causal=causal)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["key", "query"])
def test_what_is_not_finite_spoils_the_same_lines(where: str, value: float, device: str) -> None:
    """A query that sees it has no weights at all, as in plain torch, and not those of its other keys alone."""
    q, k, _ = make_qkv(N=90, Hq=4, Hkv=2, D=16, device=device)
    (k if where == "key" else q)[0, 0, 87] = value
    got = last_queries_triton.last_query_weights_triton(q[:, :, -10:], k, 90, True, 0.25)
    want = last_query_weights.reference(q[:, :, -10:], k, 90, True, 0.25)
    for ours, its in zip(got, want, strict=True):
        assert its.isnan().any(-1).tolist() == [[True, where == "key", False, False]]
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-7, equal_nan=True)

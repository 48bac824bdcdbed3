"""Weights of the last queries, by key and distance or summed by block and band: kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import run_sums
from blocksparse.kernels.score import last_queries_triton
from blocksparse.kernels.score.last_queries import last_query_weights
from blocksparse.testing import make_qkv
from tests.machine import DTYPES

slow = pytest.mark.slow


def by_kernel(last_q: Tensor, k: Tensor, M: int, scale: float, run: int | None, causal: bool) -> list[Tensor]:
    """Weights of each key and distance, or sums over runs of so many."""
    if run is None:
        return [*last_queries_triton.last_query_weights_triton(last_q, k, M, causal, scale)]
    assert causal
    assert last_queries_triton.takes_sums(last_q, run)
    return [*last_queries_triton.last_query_sums_triton(last_q, k, scale, run)]


def by_reference(last_q: Tensor, k: Tensor, M: int, scale: float, run: int | None, causal: bool) -> list[Tensor]:
    lines = last_query_weights.reference(last_q, k, M, causal, scale)
    return [line if run is None else run_sums.reference(line, run) for line in lines]


def assert_right(q: Tensor, k: Tensor, P: int, run: int | None, causal: bool = True) -> None:
    last_q, scale, M = 4 * q[:, :, -P:], q.shape[-1] ** -0.5, q.shape[2]
    want = by_reference(last_q.double(), k.double(), M, scale, run, causal)
    for ours, exact in zip(by_kernel(last_q, k, M, scale, run, causal), want, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(ours.double().sum(-1), torch.ones_like(exact[..., 0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("N", "P", "run"),
    [
        *(
            (N, P, 16)
            for N, P in ((1, 1), (63, 16), (64, 16), (83, 16), (160, 16), (161, 16), (175, 9), (170, 16))
        ),
        *(pytest.param(N, min(N, 64), None, marks=slow) for N in (1, 63, 129, 1000)),
    ],
)
def test_lengths(N: int, P: int, run: int | None, dtype: torch.dtype, device: str) -> None:
    """Bands cross tiles at every offset: two of them in a tile, or three."""
    q, k, _ = make_qkv(N=N, Hq=2, Hkv=1, D=32, dtype=dtype, device=device)
    assert_right(q, k, P, run)


@pytest.mark.parametrize("offset", range(16))
def test_offsets(offset: int, device: str) -> None:
    q, k, _ = make_qkv(N=96 + offset, Hq=1, Hkv=1, D=16, device=device)
    for P in (16, 11, 2):
        assert_right(q, k, P, 16)


@slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "P"), [(83, 83, 1), (60, 83, 60), (90, 200, 10), (150, 150, 128), (200, 60, 20)]
)
def test_numbers_of_queries(M: int, N: int, P: int, causal: bool, device: str) -> None:
    if causal and M > N:
        pytest.skip("no such call")
    q = make_qkv(B=2, N=M, Hq=4, Hkv=2, D=16, device=device)[0]
    k = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=16, device=device, seed=1)[1]
    assert_right(q, k, P, None, causal)


@slow
@pytest.mark.parametrize("run", [None, 64, 128])
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(3, 1, 80), (8, 2, 128), (7, 1, 96), (1, 1, 64), (2, 2, 256)])
def test_heads(Hq: int, Hkv: int, D: int, run: int | None, device: str) -> None:
    """Batches and groups of heads, in chunks, with strides; more tiles than one program has."""
    dtype = torch.float32 if run is None else torch.float16
    q, _, _ = make_qkv(B=2, N=200, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, device=device)
    k = make_qkv(B=2, N=10 * (run or 20) + 7, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, device=device, seed=1)[1]
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert_right(q, k, run or 16, run)


@slow
@pytest.mark.parametrize("keys", [16, 64])
def test_diagonals_that_cross_many_tiles(keys: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory on chip is small, there are fewer keys in a tile than last queries."""
    options = last_queries_triton.launch_options
    monkeypatch.setattr(last_queries_triton, "launch_options", lambda *x: {**options(*x), "BLOCK_N": keys})
    q, k, _ = make_qkv(N=170, Hq=2, Hkv=1, D=16, device=device)
    for causal in (True, False):
        assert_right(q, k, 100, None, causal)


def test_great_logits(device: str) -> None:
    """A row whose weight lies on one key of one tile: the others underflow."""
    q, k, _ = make_qkv(N=80, Hq=1, Hkv=1, D=16, device=device)
    assert_right(100 * q, k, 16, 16)


def test_sums_that_are_refused(device: str) -> None:
    q, _, _ = make_qkv(N=80, Hq=1, Hkv=1, D=16, device=device)
    assert not last_queries_triton.takes_sums(q, 16)  # more queries than a run has keys
    assert not last_queries_triton.takes_sums(q[:, :, :10], 48)
    assert not last_queries_triton.takes_sums(q[:, :, :10].double(), 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["key", "query"])
@pytest.mark.parametrize("run", [None, 16])
def test_what_is_not_finite_spoils_the_same_lines(run: int | None, where: str, value: float, device: str) -> None:
    """A query that sees it has no weights at all, as in plain torch, and not those of its other keys alone."""
    q, k, _ = make_qkv(N=90, Hq=4, Hkv=2, D=16, device=device)
    (k if where == "key" else q)[0, 0, 87] = value
    given = q[:, :, -10:], k, 90, 0.25, run, True
    for ours, its in zip(by_kernel(*given), by_reference(*given), strict=True):
        assert its.isnan().any(-1).tolist() == [[True, where == "key", False, False]]
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-7, equal_nan=True)

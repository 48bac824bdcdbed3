"""What chooses blocks on a CPU: the compiled kernel against its reference, in float64 where sums are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.order.coarse_order import coarse_order, mean_and_products
from blocksparse.kernels.order.segments import key_importance
from blocksparse.kernels.score import cpu_scores
from blocksparse.kernels.score.block_mean import block_mean, block_similarity
from blocksparse.kernels.score.last_queries import last_query_weights
from blocksparse.kernels.score.strided_mass import strided_mass
from blocksparse.testing import make_qkv
from tests.kernels.test_strided import of_mass as arguments

pytestmark = pytest.mark.skipif(not cpu_scores.takes(torch.zeros(1)), reason="no compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_mass_is_right(given: dict[str, Any]) -> None:
    got = cpu_scores.strided_mass_on_cpu(**given)
    want = strided_mass.reference(**{name: x.double() if name in ("q", "k") else x for name, x in given.items()})
    short = given["of"].q_lead or (given["q"].shape[2] | given["k"].shape[2]) % given["of"].slots
    rounding = 1e-2 if short and given["q"].dtype != torch.float32 else 0.0  # of what fills a short cell
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-5 + rounding, atol=1e-6 + rounding / 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changed", [
    {}, {"flipped": False}, {"padded_tail": True}, {"segment": 8}, {"high": 3, "wide": 8}, {"high": 70, "wide": 1},
    {"slots": 1, "flipped": False}, {"slots": 16, "high": 1, "wide": 2}, {"causal": False}, {"behind": 5},
], ids=repr)  # fmt: skip
def test_mass(changed: dict[str, Any], dtype: torch.dtype) -> None:
    for N, M, Hq, Hkv, D in ((1, 1, 1, 1, 16), (143, 122, 6, 2, 20), (600, 600, 3, 3, 15), (130, 7, 14, 2, 64)):
        q, k, _ = make_qkv(B=2, N=N, M=M, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype)
        assert_mass_is_right(arguments(4 * q, k, **changed))


@pytest.mark.parametrize("heads", [1, 2])
def test_mass_in_any_order(heads: int) -> None:
    """Positions for all heads or each KV head, with the last ones that a window needs; some cells reach nothing."""
    q, k, _ = make_qkv(B=2, N=520, Hq=6, Hkv=2, D=16)
    generator = torch.Generator().manual_seed(0)
    first = (torch.rand(2, heads, 130, generator=generator) * 520).int()
    last = torch.arange(3, 520, 4, dtype=torch.int32).view(1, 1, -1)
    assert_mass_is_right(arguments(8 * q, k, q_last=last, k_first=first, segment=4))
    first[..., 0] = 0  # every query reaches a cell
    window: dict[str, Any] = {"q_floor": last - 600, "k_last": first + 3}
    assert_mass_is_right(arguments(8 * q, k, q_last=last, k_first=first, **window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "P"), [(83, 83, 1), (60, 83, 60), (90, 700, 10), (150, 150, 128), (200, 60, 20), (2100, 2100, 130)]
)
def test_numbers_of_queries(M: int, N: int, P: int, dtype: torch.dtype) -> None:
    q = make_qkv(B=2, N=M, Hq=4, Hkv=2, D=20, dtype=dtype)[0]
    k = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=20, dtype=dtype, seed=1)[1]
    for causal, window in ((True, None), (True, 30), (False, None)):
        if causal and M > N:
            continue
        given = (4 * q[:, :, -P:], k, M, causal, 0.3, window)
        got = cpu_scores.last_query_weights_on_cpu(*given)
        want = last_query_weights.reference(given[0].double(), k.double(), *given[2:])
        for ours, exact in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-7)
    for seen, causal, per_query_head in ((N, True, True), (N - N // 3, False, True), (N, True, False)):
        if M > N:
            continue
        rest = (P, seen, causal, 0.3, per_query_head)
        weight = cpu_scores.key_importance_on_cpu(4 * q, k, *rest).sum(2)
        exact = key_importance.reference(4 * q.double(), k.double(), *rest).sum(2)
        torch.testing.assert_close(weight.double(), exact, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_threads_nor_chunks_nor_layouts_change_a_bit(dtype: torch.dtype) -> None:
    q, k, _ = make_qkv(B=1, N=640, Hq=6, Hkv=2, D=32, dtype=dtype)

    def of(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        lines = cpu_scores.last_query_weights_on_cpu(q[:, :, -64:], k, q.shape[2], True, 0.2)
        means = cpu_scores.block_mean_on_cpu(q, 80, 0, False, None), cpu_scores.products_on_cpu(q, k)
        return (
            cpu_scores.strided_mass_on_cpu(**arguments(4 * q, k))[:, :, -20:],
            *(x[:, :, -4:] for x in means),
            *lines,
        )

    whole, threads = of(q, k), torch.get_num_threads()
    moved = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    try:
        torch.set_num_threads(7 - threads)
        others = of(q, k)
    finally:
        torch.set_num_threads(threads)
    for other in (others, of(q[:, :, -320:], k), of(*moved)):
        assert all(torch.equal(*pair) for pair in zip(whole, other, strict=True))


def test_a_nan_reaches_the_rows_that_see_it_alone() -> None:
    q, k, _ = make_qkv(N=320, Hq=2, Hkv=1, D=16)
    clean = cpu_scores.strided_mass_on_cpu(**arguments(q, k))
    k[:, :, 163] = float("nan")
    torch.testing.assert_close(clean[:, :, :10], cpu_scores.strided_mass_on_cpu(**arguments(q, k))[:, :, :10])
    assert cpu_scores.strided_mass_on_cpu(**arguments(q, k))[:, :, 11:].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("N", "D", "block", "lead"), [(300, 64, 128, 0), (65, 20, 16, 7), (1, 1, 64, 63), (200, 40, 2**30, 3)]
)
def test_means_and_similarities(N: int, D: int, block: int, lead: int, dtype: torch.dtype) -> None:
    x = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=D, dtype=dtype)[1].transpose(1, 2).contiguous().transpose(1, 2)
    x[:, 1, 0] = 0.0  # a token of zeros is like no other
    index = torch.rand(2, 4, N).argsort(-1).int()
    for order in (None, index):
        for padded in (False, True):
            got = cpu_scores.block_mean_on_cpu(x, block, lead, padded, order)
            want = block_mean.reference(x.double(), block, lead, padded, order)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        for centred in (False, True):
            got = cpu_scores.block_similarity_on_cpu(x, block, lead, centred, order)
            want = block_similarity.reference(x.double(), block, lead, centred, order)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    q, guide = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=D, dtype=dtype)[0], torch.randn(2, 2, D)
    found = cpu_scores.mean_and_products_on_cpu(q, guide, block, lead)
    for ours, exact in zip(
        found, mean_and_products.reference(q.double(), guide.double(), block, lead), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_orders(dtype: torch.dtype) -> None:
    """Of the same scores, also infinite ones and NaN, the order is that of the reference."""
    q, k, _ = make_qkv(B=2, N=150, M=100, Hq=6, Hkv=2, D=33, dtype=dtype)
    want = products(q.double(), k.double())
    torch.testing.assert_close(cpu_scores.products_on_cpu(q, k).double(), want, rtol=1e-5, atol=1e-5)
    scores = torch.randint(-60, 60, (2, 6, 5, 300), generator=torch.Generator().manual_seed(0)) / 7.0
    scores[0, 1, :, 7::24], scores[1, 2, :, ::5] = torch.inf, torch.nan
    scores[0, 3], scores[1, 4] = -torch.inf, 1.5
    keys, one = scores.reshape(60, 1, 300).mT.unsqueeze(0), torch.ones(1, 60, 1, 1)
    for until, count in ((60, 70), (-130, 250), (300, 1)):
        out = torch.full((2, 6, 5, 9 + count), 7, dtype=torch.int32)
        cpu_scores.order_on_cpu(scores, until, 50, out[..., 9:])
        assert bool((out[..., :9] == 7).all())
        for row in range(60):
            exact = torch.full((1, 1, 1, count), 7, dtype=torch.int32)
            coarse_order.reference(one[:, :1], keys[:, row : row + 1], until + row % 5 * 50, 50, exact)
            assert torch.equal(out.view(60, -1)[row, 9:], exact.flatten()), (until, row)

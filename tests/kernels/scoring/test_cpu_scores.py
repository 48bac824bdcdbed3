"""Mass of cells and lines of a probe: the kernel compiled for this CPU against the plain torch twins in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.scoring.test_cell_mass import arguments
from torch import Tensor

from blocksparse.kernels.ordering.key_importance import key_importance_reference
from blocksparse.kernels.scoring import cpu_scores
from blocksparse.kernels.scoring.cell_mass import cell_mass_reference
from blocksparse.kernels.scoring.probe_lines import probe_lines_reference
from blocksparse.testing import make_qkv

pytestmark = pytest.mark.skipif(not cpu_scores.takes(torch.zeros(1)), reason="no compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_mass_is_right(given: dict[str, Any]) -> None:
    got = cpu_scores.cell_mass_on_cpu(**given)
    want = cell_mass_reference(**{name: x.double() if name in ("q", "k") else x for name, x in given.items()})
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
def test_probes(M: int, N: int, P: int, dtype: torch.dtype) -> None:
    q = make_qkv(B=2, N=M, Hq=4, Hkv=2, D=20, dtype=dtype)[0]
    k = make_qkv(B=2, N=N, Hq=4, Hkv=2, D=20, dtype=dtype, seed=1)[1]
    for causal, window in ((True, None), (True, 30), (False, None)):
        if causal and M > N:
            continue
        given = (4 * q[:, :, -P:], k, M, causal, 0.3, window)
        got = cpu_scores.probe_lines_on_cpu(*given)
        want = probe_lines_reference(given[0].double(), k.double(), *given[2:])
        for ours, exact in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-7)
    for seen, causal, per_query_head in ((N, True, True), (N - N // 3, False, True), (N, True, False)):
        if M > N:
            continue
        rest = (P, seen, causal, 0.3, per_query_head)
        weight = cpu_scores.key_importance_on_cpu(4 * q, k, *rest).sum(2)
        exact = key_importance_reference(4 * q.double(), k.double(), *rest).sum(2)
        torch.testing.assert_close(weight.double(), exact, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_threads_nor_chunks_nor_layouts_change_a_bit(dtype: torch.dtype) -> None:
    q, k, _ = make_qkv(B=1, N=640, Hq=6, Hkv=2, D=32, dtype=dtype)

    def of(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        lines = cpu_scores.probe_lines_on_cpu(q[:, :, -64:], k, q.shape[2], True, 0.2)
        return cpu_scores.cell_mass_on_cpu(**arguments(4 * q, k))[:, :, -20:], *lines

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
    clean = cpu_scores.cell_mass_on_cpu(**arguments(q, k))
    k[:, :, 163] = float("nan")
    torch.testing.assert_close(clean[:, :, :10], cpu_scores.cell_mass_on_cpu(**arguments(q, k))[:, :, :10])
    assert cpu_scores.cell_mass_on_cpu(**arguments(q, k))[:, :, 11:].isnan().any(-1).all()

"""The best product of groups: the Triton kernel against the reference in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.kernels.gemm.strided_products_triton import ProductTiles
from blocksparse.kernels.score import strided_means_triton
from blocksparse.kernels.score.strided_means import group_max
from blocksparse.testing import make_qkv
from tests.machine import DTYPES

SMALL = ProductTiles(16, 16, 32, 4, 2)  # several tiles in a short prompt


def arguments(q: Tensor, k: Tensor, g: int = 8, *, high: int = 4, wide: int = 4, **changed: Any) -> dict[str, Any]:
    causal = changed.get("causal", True)
    offset = k.shape[2] - q.shape[2] if causal else 0
    given = {
        "q": q, "k": k, "q_last": None, "k_first": None, "slots": g, "first_row": offset // (g * high),
        "q_lead": offset % (g * high), "high": high, "wide": wide, "causal": causal, "per_token": False,
        "padded_tail": False,
    }  # fmt: skip
    given |= changed
    of = StridedPooling(
        **{each.name: given.pop(each.name) for each in attrs.fields(StridedPooling) if each.name in given}
    )
    return {**given, "of": of}


def assert_right(given: dict[str, Any], tiles: ProductTiles | None = SMALL) -> Tensor:
    got = strided_means_triton.group_max_triton(**given, tiles=tiles)
    wide = {name: x.double() if name in ("q", "k") else x for name, x in given.items()}
    want = group_max.reference(**wide)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 63, 65, 127, 129, 200, 256])
def test_lengths(N: int, dtype: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(N=N, Hq=2, Hkv=1, D=32, dtype=dtype, device=device)
    assert_right(arguments(q, k))


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 30, 65, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("per_token", "padded_tail"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_chunks(M: int, causal: bool, per_token: bool, padded_tail: bool, device: str) -> None:
    q, k, _ = make_qkv(B=2, N=141, M=M, Hq=2, Hkv=1, D=16, device=device)
    assert_right(arguments(q, k, causal=causal, per_token=per_token, padded_tail=padded_tail))


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 1), (8, 2), (7, 1)])
@pytest.mark.parametrize("per_head", [False, True])
def test_orders(Hq: int, Hkv: int, per_head: bool, device: str) -> None:
    q, k, _ = make_qkv(N=128, Hq=Hq, Hkv=Hkv, D=16, device=device)
    heads = Hq if per_head else 1
    first = (torch.rand(1, heads, 16, generator=torch.Generator().manual_seed(0)) * 128).int().to(device)
    last = torch.arange(31, 128, 32, dtype=torch.int32, device=device).view(1, 1, -1)
    got = assert_right(arguments(q, k, q_last=last, k_first=first))
    assert bool((got == float("-inf")).any())


@pytest.mark.parametrize(("high", "wide"), [(1, 1), (1, 4), (8, 2), (16, 16)])
def test_blocks(high: int, wide: int, device: str) -> None:
    q, k, _ = make_qkv(N=150, M=77, Hq=2, Hkv=1, D=16, device=device)
    assert_right(arguments(q, k, 4, high=high, wide=wide))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_head_dims(D: int, device: str) -> None:
    q, k, _ = make_qkv(N=70, Hq=2, Hkv=1, D=D, dtype=torch.float16, device=device)
    assert_right(arguments(q, k, 8, high=2, wide=2), tiles=None)


@pytest.mark.slow
@pytest.mark.parametrize(("N", "M"), [(1000, 1000), (1024, 1024), (1000, 615)])
def test_of_a_gpu_s_tiles(N: int, M: int, device: str) -> None:
    """Tiles of the size that a GPU takes, whole ones and short ones."""
    q, k, _ = make_qkv(N=N, M=M, Hq=2, Hkv=1, D=64, dtype=torch.float16, device=device)
    assert_right(arguments(q, k, 4), tiles=ProductTiles(128, 128, 64, 8, 3))

"""Rounding queries and keys to int8 in one launch: the reference's numbers, to the bit.

bfloat16 is only read, which the interpreter does rightly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import blocksparse as bs
from blocksparse.execute import int8 as int8_operands
from blocksparse.kernels.quantize.tokens import int8_keys, int8_queries
from blocksparse.kernels.quantize.tokens_triton import divided, int8_keys_triton, int8_queries_triton
from blocksparse.launch.launches import remembered
from blocksparse.testing import make_qkv
from tests.kernels.quantize.test_fp8_values import slots_of, tokens


def assert_equal(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
    """The same 8 bits and the same scales; what the mean takes is a sum, and close."""
    for g, w in zip(got[:2], want[:2], strict=True):
        assert g is not None
        assert w is not None
        assert g.is_contiguous()
        assert torch.equal(g, w)
    for g, w in zip(got[2:], want[2:], strict=True):
        assert (g is None) == (w is None)
        if g is not None and w is not None:
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


# The kernel against its reference


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        pytest.param(80, torch.float32, marks=pytest.mark.slow),
        (80, torch.float16),
        pytest.param(128, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_queries(D: int, dtype: torch.dtype, shared: bool, device: str) -> None:
    q, mean = tokens(2, 6, 70, D, device=device, dtype=dtype), tokens(2, 3, D, device=device, seed=1)
    index = slots_of(2, 6, 70, tokens_=70, device=device)
    plain = torch.tensor([1, 0, 1], dtype=torch.int32, device=device).expand(2, 1, 3)
    for call in (
        (None, 32, 0, shared, None, 1.0, None),
        (None, 32, 5, shared, mean, 0.3, plain),
        (index, 32, 21, shared, mean, 0.3, plain.expand(2, 6, 3)),
    ):
        assert_equal(int8_queries_triton(q, *call), int8_queries.reference(q, *call))


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("per_key", "dtype"),
    [
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, torch.float16, marks=pytest.mark.slow),
        (1, torch.bfloat16),
    ],
    ids=str,
)
def test_keys(per_key: int, dtype: torch.dtype, shared: bool, device: str) -> None:
    k = tokens(2, 2, 90, 48, device=device, dtype=dtype) + tokens(1, 2, 1, 48, device=device, dtype=dtype, seed=1)
    mean = k.float().mean(2)
    index = slots_of(2, 2 * per_key, 110, tokens_=90, device=device)
    for call in (
        (None, 32, shared, None, 0),
        (None, 32, shared, mean, 0),
        (index, 32, shared, mean, 0),
        (index, 32, shared, mean, 90),
    ):
        assert_equal(int8_keys_triton(k, *call), int8_keys.reference(k, *call))


@pytest.mark.parametrize(("block", "N"), [(1, 9), (24, 100), (512, 600)])
def test_blocks_of_every_size(block: int, N: int, device: str) -> None:
    x = tokens(1, 1, N, 64, device=device)
    call = None, block, block // 3, True, None, 1.0, None
    assert_equal(int8_queries_triton(x, *call), int8_queries.reference(x, *call))
    k_call = None, block, True, tokens(1, 1, 64, device=device, seed=1), N
    assert_equal(int8_keys_triton(x, *k_call), int8_keys.reference(x, *k_call))


@pytest.mark.parametrize("N", [1, 63, 129])
def test_lengths(N: int, device: str) -> None:
    x = tokens(1, 2, N, 64, device=device)
    for shared in (False, True):
        assert_equal(
            int8_keys_triton(x, None, 64, shared, None, 0), int8_keys.reference(x, None, 64, shared, None, 0)
        )


def test_layouts_and_broadcast_maps(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; orders of tokens on a grid are one map for all heads."""
    x, index = tokens(2, 70, 3, 32, device=device).transpose(1, 2), slots_of(70, tokens_=70, device=device)
    mean = x.mean(2)
    for y in (x, tokens(2, 3, 32, 70, device=device).mT):
        for order in (None, index.expand(2, 3, 70), slots_of(2, 3, 140, tokens_=70, device=device)[..., ::2]):
            call = order, 32, False, mean, 0
            assert_equal(int8_keys_triton(y, *call), int8_keys.reference(y, *call))


def test_empty_slots_are_zeros(device: str) -> None:
    index = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=device).view(1, 1, 4)
    x, mean = tokens(1, 1, 4, 16, device=device), tokens(1, 1, 16, device=device, seed=1)
    for shared in (False, True):
        for values, scale, *taken in (
            int8_keys_triton(x, index, 4, shared, mean, 0),
            int8_queries_triton(x, index, 4, 0, shared, mean, 1.0, None),
        ):
            assert (values[0, 0, [1, 3]] == 0).all()
            assert values[0, 0, [0, 2]].abs().sum() > 0
            for per_token in (scale, *(x for x in taken if x is not None)):
                assert per_token.bool().tolist() == [[[True, False, True, False]]]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_keys_before_a_token(shared: bool, device: str) -> None:
    """Blocks without a key before it are left out; the smoothed copy is whole."""
    k, index = tokens(1, 1, 1024, 64, device=device), torch.arange(1024, dtype=torch.int32, device=device)
    mean = k.mean(2)
    for order in (None, index.view(1, 1, -1), index.flip(0).view(1, 1, -1)):
        want, want_scale = int8_keys.reference(k, order, 64, shared, mean, 1)
        got, scale = int8_keys_triton(k, order, 64, shared, mean, 130)
        assert torch.equal(got[:, 0], want[:, 0])
        assert torch.equal(scale[:, 0], want_scale[:, 0])
        early = (index if order is None else order[0, 0]) < 130
        assert torch.equal(got[:, 1, early], want[:, 1, early])
        assert torch.equal(scale[:, 1, early], want_scale[:, 1, early])
        if device == "cpu":  # where memory is poisoned whoever allocates it
            assert not scale[:, 1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["token", "block"])
@pytest.mark.parametrize("M", [200, 333])
@pytest.mark.parametrize("permuted", [False, True])
def test_nobody_reads_what_is_left_out(
    permuted: bool, M: int, scales: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.to(device) for x in make_qkv(N=333, M=M, Hq=2, Hkv=1, D=128))
    order = bs.SegmentKeySort(S=64) if permuted else bs.Identity()
    executor = bs.Int8Executor(False, scales=scales)
    pipeline = bs.Pipeline(order, bs.MeanPoolScorer(32), bs.TopK(99), executor)

    def run(*, by_kernel: bool) -> Tensor:
        def keys(
            k: Tensor, index: Tensor | None, block: int, *, shared: bool, mean: Tensor, plain_below: int
        ) -> Any:
            return (int8_keys_triton if by_kernel else int8_keys.reference)(
                k, index, block, shared, mean, plain_below
            )

        monkeypatch.setattr(int8_operands, "int8_keys", keys)
        return pipeline(q, k, v)

    assert torch.equal(run(by_kernel=True), run(by_kernel=False))


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_token(value: float, device: str) -> None:
    x = tokens(1, 1, 40, 24, device=device)
    want, want_scale = int8_keys.reference(x, None, 32, False, None, 0)
    x[0, 0, 7, 3] = value
    rest = torch.arange(40, device=device) != 7
    for values, scale in (
        int8_keys_triton(x, None, 32, False, None, 0),
        int8_keys.reference(x, None, 32, False, None, 0),
    ):
        assert scale[0, 0, 7].isnan()
        assert torch.equal(values[:, :, rest], want[:, :, rest])
        assert torch.equal(scale[:, :, rest], want_scale[:, :, rest])
    shared = int8_keys_triton(x, None, 32, True, None, 0)[1]
    assert shared[0, 0].isnan().tolist() == [True] * 32 + [False] * 8


# Division


@pytest.mark.parametrize("size", [1e-38, 1e-30, 2e-30, 1e-25, 1e-20, 1e-18, 1.0, 1e30, 3e38])
def test_ties_at_every_size(size: float, device: str) -> None:
    """Entries at and beside the middle between two integers, where one step of a quotient decides."""
    generator = torch.Generator().manual_seed(0)
    x = size * (2 * torch.rand(1, 1, 64, 128, generator=generator) - 1)
    largest = x.abs().amax(-1, keepdim=True)
    half = (torch.randint(-126, 126, (1, 1, 64, 90), generator=generator) + 0.5) * (largest / 127)
    towards = torch.tensor([-torch.inf, torch.inf])[torch.randint(0, 2, half.shape, generator=generator)]
    x[..., 1:91] = torch.where(
        torch.rand(half.shape, generator=generator) < 0.5, half, torch.nextafter(half, towards)
    )
    x[..., 91:92], x[..., 92] = largest / 2, -0.0
    x[..., :1] = largest
    x = x.clamp(-largest, largest).to(device)
    for y in (x, x.bfloat16()):
        for shared in (False, True):
            call = None, 16, shared, None, 0
            assert_equal(int8_keys_triton(y, *call), int8_keys.reference(y, *call))


@remembered
@triton.jit  # type: ignore[untyped-decorator]
def _divide(x_ptr, scale_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)
    at = row[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out_ptr + at, divided(tl.load(x_ptr + at), tl.load(scale_ptr + row)))


@cache
def hard_quotients(rows: int) -> list[tuple[int, int]]:
    """Dividends and divisors of 24 bits."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(2**23, 2**24, (40_000,), generator=draw).tolist()
    found = []
    for number in numbers:
        middle = 2 * number + 1  # between two neighbours, in half steps
        for short in (-3, -1, 1, 3):
            for bits in (24, 25):
                divisor = -short * pow(middle, -1, 2**bits) % 2**bits
                x = (middle * divisor + short) >> bits
                if 2**23 <= divisor < 2**24 and 2**23 <= x < 2**24:
                    found.append((x, divisor))
        if len(found) >= rows:
            break
    return found[:rows]


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [-100, -66, -20, 0, 60])
def test_hardest_quotients(exponent: int, device: str) -> None:
    """Closer to the middle between two floats than any but a few quotients are."""
    rows = 4096
    x, scale = torch.tensor(hard_quotients(rows), dtype=torch.float64).T
    assert len(x) == rows
    scale = (scale * 2.0 ** (exponent - 23)).float()
    x = (x[:, None] * 2.0 ** (exponent - 23 + torch.arange(-2, 6))).float()  # quotients up to 64
    want = (x.double() / scale[:, None].double()).float()  # 53 bits suffice not to be rounded twice
    got = torch.empty_like(x, device=device)
    _divide[(1,)](x.to(device), scale.to(device), got, ROWS=rows, COLS=8)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(want, x / scale[:, None])

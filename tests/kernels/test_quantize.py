"""Rounding to 8 bits in one launch: the reference's numbers, to the bit or to a step, and what they stand for.

The interpreter reads bfloat16 rightly, and multiplies it wrongly.
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
from blocksparse.kernels.quantize import tokens_triton as module
from blocksparse.kernels.quantize.tile_operands import fp8_value_tiles, int8_key_tiles, int8_query_tiles, rotated
from blocksparse.kernels.quantize.tile_operands_triton import (
    fp8_value_tiles_triton,
    int8_key_tiles_triton,
    int8_query_tiles_triton,
)
from blocksparse.kernels.quantize.tokens import fp8_values, int8_keys, int8_queries
from blocksparse.kernels.quantize.tokens_triton import (
    divided,
    fp8_values_triton,
    int8_keys_triton,
    int8_queries_triton,
)
from blocksparse.launch.launches import remembered
from blocksparse.testing import make_qkv
from tests.cases import slow
from tests.kernels.attention.references import in_order, of_slots
from tests.kernels.compare import randn

# Values in fp8


def slots_of(*shape: int, tokens_: int, device: str) -> Tensor:
    """Every slot names some token or is empty."""
    index = torch.randint(-1, tokens_, shape, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return index.to(device)


def assert_values(v: Tensor, index: Tensor | None = None) -> None:
    """Numbers compare equal, so that -0.0 may be 0.0."""
    values, scale = fp8_values_triton(v, index)
    want, want_scale = fp8_values.reference(v, index)
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scale, want_scale)


@pytest.fixture(params=["conversion", "arithmetic"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is hardware for it, both ways."""
    if request.param == "arithmetic":
        monkeypatch.setattr(module, "converts_to_fp8", lambda x: False)
    elif not torch.cuda.is_available():
        pytest.skip("the interpreter rounds to fp8 wrongly")
    return str(request.param)


@pytest.mark.parametrize("N", [1, 15, 63, 64, 129, 300])
def test_values_of_lengths(N: int, way: str, device: str) -> None:
    assert_values(randn(1, 2, N, 64, device=device))


@pytest.mark.parametrize("D", [16, *slow((80,), (256,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_dims_and_dtypes(D: int, dtype: torch.dtype, way: str, device: str) -> None:
    assert_values(randn(2, 2, 70, D, device=device, dtype=dtype), slots_of(2, 4, 90, tokens_=70, device=device))


def test_values_in_layouts(way: str, device: str) -> None:
    index = slots_of(70, tokens_=70, device=device).expand(2, 3, 70)
    assert_values(randn(2, 70, 3, 32, device=device).transpose(1, 2), index)
    assert_values(randn(2, 3, 32, 70, device=device).mT)


def test_every_number_and_what_lies_between(way: str, device: str) -> None:
    """The first entry is the largest, so that the scale is one."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(between, torch.tensor(to)) for to in (0.0, 500.0)]
    entries = torch.cat((numbers, between, *near))
    largest = torch.full((1, 1, 2, 1), 448.0)
    v = torch.cat((largest, torch.stack((entries, -entries)).view(1, 1, 2, -1)), -1).to(device)
    assert torch.equal(fp8_values_triton(v, None)[1], torch.ones(1, 1, 2, device=device))
    assert_values(v)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-25, 1e-18, 1e30, 3e38])
def test_every_size(size: float, way: str, device: str) -> None:
    spread = torch.logspace(-4, 0, 64, device=device)
    assert_values(randn(1, 1, 50, 64, device=device).clamp(-3, 3) / 3 * spread * size)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_token(value: float, way: str, device: str) -> None:
    """In fp8 and in int8; of a scale for a block, in their block."""
    call = None, 32, False, None, 0
    clean = randn(1, 1, 40, 24, device=device)
    bad, rest = clean.clone(), torch.arange(40, device=device) != 7
    bad[0, 0, 7, 3] = value
    for operation, kernel, more in ((fp8_values, fp8_values_triton, (None,)), (int8_keys, int8_keys_triton, call)):
        want, want_scale = operation.reference(clean, *more)
        for compute in (kernel, operation.reference):
            values, scale = compute(bad, *more)
            assert scale[0, 0, 7].isnan()
            assert values.dtype == torch.int8 or values[0, 0, 7].isnan().all()
            assert torch.equal(values[:, :, rest].float(), want[:, :, rest].float())
            assert torch.equal(scale[:, :, rest], want_scale[:, :, rest])
    shared = int8_keys_triton(bad, None, 32, True, None, 0)[1]
    assert shared[0, 0].isnan().tolist() == [True] * 32 + [False] * 8


# Queries and keys in int8


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
    [(80, torch.float16), *slow((80, torch.float32), (128, torch.bfloat16))],
    ids=str,
)
def test_queries(D: int, dtype: torch.dtype, shared: bool, device: str) -> None:
    q, mean = randn(2, 6, 70, D, device=device, dtype=dtype), randn(2, 3, D, device=device, seed=1)
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
    [(1, torch.bfloat16), *slow((1, torch.float32), (2, torch.float16))],
    ids=str,
)
def test_keys(per_key: int, dtype: torch.dtype, shared: bool, device: str) -> None:
    k = randn(2, 2, 90, 48, device=device, dtype=dtype) + randn(1, 2, 1, 48, device=device, dtype=dtype, seed=1)
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
    x = randn(1, 1, N, 64, device=device)
    call = None, block, block // 3, True, None, 1.0, None
    assert_equal(int8_queries_triton(x, *call), int8_queries.reference(x, *call))
    k_call = None, block, True, randn(1, 1, 64, device=device, seed=1), N
    assert_equal(int8_keys_triton(x, *k_call), int8_keys.reference(x, *k_call))


def test_layouts_and_broadcast_maps(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; orders of tokens on a grid are one map for all heads."""
    x, index = randn(2, 70, 3, 32, device=device).transpose(1, 2), slots_of(70, tokens_=70, device=device)
    mean = x.mean(2)
    for y in (x, randn(2, 3, 32, 70, device=device).mT):
        for order in (None, index.expand(2, 3, 70), slots_of(2, 3, 140, tokens_=70, device=device)[..., ::2]):
            call = order, 32, False, mean, 0
            assert_equal(int8_keys_triton(y, *call), int8_keys.reference(y, *call))


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_keys_before_a_token(shared: bool, device: str) -> None:
    """Blocks without a key before it are left out; the smoothed copy is whole."""
    k, index = randn(1, 1, 1024, 64, device=device), torch.arange(1024, dtype=torch.int32, device=device)
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


# Operands of 8-bit attention on Hopper


def assert_close_int8(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
    """Sums of another order: scales differ in their last bits, and a number here and there by one."""
    assert got[0] is not None
    assert want[0] is not None
    assert got[0].is_contiguous()
    off = (got[0].int() - want[0].int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 1e-3
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=0)


def check_queries(q: Tensor, index: Tensor | None, mean: Tensor | None, early: int) -> None:
    call = q, index, mean, 0.3, early
    values, scale, taken = int8_query_tiles_triton(*call)
    want = int8_query_tiles.reference(*call)
    assert_close_int8((values, scale), want[:2])
    assert (taken is None) == (mean is None)
    if mean is not None and taken is not None:
        per_head = rotated(mean).double().repeat_interleave(q.shape[1] // mean.shape[1], 1)
        by_hand = 0.3 * scale.double() * (values.double() @ per_head.unsqueeze(-1)).squeeze(-1)
        token = torch.arange(q.shape[2], device=q.device) if index is None else index
        torch.testing.assert_close(taken.double(), by_hand.masked_fill(token < early, 0), rtol=1e-5, atol=1e-5)
        assert want[2] is not None
        torch.testing.assert_close(taken, want[2], rtol=1e-3, atol=3e-2)  # a number that differs by one


def check_keys(k: Tensor, index: Tensor | None, tile: int, mean: Tensor | None) -> None:
    assert_close_int8(int8_key_tiles_triton(k, index, tile, mean), int8_key_tiles.reference(k, index, tile, mean))


def check_values(v: Tensor, index: Tensor | None, tile: int) -> None:
    got, want = fp8_value_tiles_triton(v, index, tile), fp8_value_tiles.reference(v, index, tile)
    assert got[0].dtype == torch.float8_e4m3fn
    assert got[0].is_contiguous()
    assert torch.equal(got[0].float(), want[0].float())  # -0.0 may be 0.0
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)


# Kernels against references


@pytest.mark.slow
@pytest.mark.parametrize(("D", "tile", "dtype"), [(64, 128, torch.float16), (128, 64, torch.float32)], ids=str)
def test_maps_and_shared_keys(D: int, tile: int, dtype: torch.dtype, device: str) -> None:
    x, mean = randn(2, 2, 90, D, device=device, dtype=dtype), randn(2, 2, D, device=device, seed=1)
    index = slots_of(2, 4, 150, tokens_=90, device=device)
    check_keys(x, index, tile, mean)
    check_values(x, index, tile)
    q = randn(2, 4, 90, D, device=device, dtype=dtype)
    check_queries(q, index[..., :90], mean, 20)
    check_queries(q, index[:, :1, :90].expand(2, 4, 90), None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("N", [1, 63, 129, 300])
def test_tiles_of_lengths(N: int, D: int, tile: int, dtype: torch.dtype, device: str) -> None:
    x, mean = randn(1, 2, N, D, device=device, dtype=dtype), randn(1, 1, D, device=device, seed=1)
    check_queries(x, None, mean, 17)
    check_keys(x, None, tile, mean)
    check_keys(x, None, tile, None)
    check_values(x, None, tile)


@pytest.mark.slow
def test_many_rounds_of_a_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program has fewer slots than rounds."""
    monkeypatch.setattr("blocksparse.kernels.quantize.tile_operands_triton._resident", lambda *_: 3)
    x, mean = randn(1, 1, 1300, 64, device=device), randn(1, 1, 64, device=device, seed=1)
    index = slots_of(1, 1, 1300, tokens_=1300, device=device)
    check_queries(x, index, mean, 17)
    check_keys(x, index, 64, mean)


@pytest.mark.slow
def test_tiles_in_layouts(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; maps may be one for all heads, or every other entry of another."""
    index = slots_of(70, tokens_=70, device=device)
    for x in (randn(2, 70, 3, 64, device=device).transpose(1, 2), randn(2, 3, 64, 70, device=device).mT):
        for order in (index.expand(2, 3, 70), slots_of(2, 3, 140, tokens_=70, device=device)[..., ::2]):
            check_queries(x, order, None, 0)
            check_keys(x, order, 64, x.mean(2))
            check_values(x, order, 64)
    shared = int8_query_tiles(x, index.expand(2, 1, 70))
    assert torch.equal(shared[0], int8_query_tiles(x, index.expand(2, 3, 70))[0])


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-31, 1e-28, 1e30])
def test_values_of_every_size(size: float, device: str) -> None:
    """Logarithms stay finite."""
    v = randn(1, 1, 70, 64, device=device) * size
    for x in (v, v.bfloat16()):
        check_values(x, None, 64)
    for log in fp8_value_tiles(v, None, 64)[1:]:
        assert log.isfinite().all()
        assert (log >= -100).all()


def test_other_sizes_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="not 80"):
        int8_query_tiles_triton(randn(1, 1, 8, 80, device=device), None)
    for f in (int8_key_tiles_triton, fp8_value_tiles_triton):
        with pytest.raises(ValueError, match="and 32"):
            f(randn(1, 1, 8, 64, device=device), None, 32)


# What the numbers stand for


@pytest.mark.parametrize("D", [64, 128])
def test_rotation_keeps_products(D: int) -> None:
    x, y = randn(40, D, device="cpu"), randn(50, D, device="cpu", seed=1)
    torch.testing.assert_close(rotated(x) @ rotated(y).T, x @ y.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(rotated(rotated(x)), x)
    bits = [[(-1) ** bin(i & j).count("1") for j in range(D)] for i in range(D)]
    assert torch.equal((rotated(torch.eye(D)) * D**0.5).round(), torch.tensor(bits).float())


@pytest.mark.parametrize("tile", [64, 128])
def test_logits_are_close(tile: int, device: str) -> None:
    """With what the mean took given back, both copies of the keys have the same logits."""
    D, N = 128, 300
    q, k = randn(1, 4, N, D, device=device), randn(1, 2, N, D, device=device, seed=1)
    k = k + 3 * randn(1, 2, 1, D, device=device, seed=2)
    mean, want = k.mean(2), 0.3 * q @ k.repeat_interleave(2, 1).mT
    values, q_scale, taken = int8_query_tiles_triton(q, None, mean, 0.3, 0)
    keys, tile_scale, token_scale = int8_key_tiles_triton(k, None, tile, mean)
    assert taken is not None
    smooth = keys[:, :2] * of_slots(tile_scale, tile, N).unsqueeze(-1)
    plain = keys[:, 2:] * token_scale.unsqueeze(-1)
    queries = 0.3 * values * q_scale.unsqueeze(-1)
    for logits, limit in (
        (queries @ smooth.repeat_interleave(2, 1).mT + taken.unsqueeze(-1), 0.015),
        (queries @ plain.repeat_interleave(2, 1).mT, 0.015),
    ):
        assert (logits - want).norm() < limit * want.norm()
    # The query as rounded: beside those of keys as they are, nothing but the rounding of keys is left.
    exact = queries @ rotated(k).repeat_interleave(2, 1).mT
    left = queries @ (rotated(k) - rotated(mean).unsqueeze(2)).repeat_interleave(2, 1).mT + taken.unsqueeze(-1)
    torch.testing.assert_close(left, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tile", [64, 128])
def test_values_are_close(tile: int, device: str) -> None:
    N = 150
    v = randn(1, 2, N, 64, device=device)
    values, tile_log2, of_tokens = fp8_value_tiles_triton(v, None, tile)
    scale = torch.cat((of_slots(tile_log2, tile, N), of_tokens[:, : tile_log2.shape[1]]), 1).exp2()
    torch.testing.assert_close(
        in_order(values.float(), N) * scale.unsqueeze(-1), torch.cat((v, v), 1), rtol=1 / 15, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_bad_numbers_stay_in_their_group(by_kernel: bool, value: float, device: str) -> None:
    x, slot = randn(1, 1, 256, 64, device=device), torch.arange(256, device=device)
    x[0, 0, 71, 3] = value
    bad, group = slot == 71, (slot // 64 == 1) & (slot % 8 // 2 == 3)
    keys = int8_key_tiles_triton if by_kernel else int8_key_tiles.reference
    queries = int8_query_tiles_triton if by_kernel else int8_query_tiles.reference
    fp8 = fp8_value_tiles_triton if by_kernel else fp8_value_tiles.reference
    mean = randn(1, 1, 64, device=device, seed=1)
    for numbers in queries(x, None, mean, 1.0, 0)[1:]:
        assert numbers is not None
        assert torch.equal(numbers[0, 0].isnan(), bad)
    for _, tile_scale, token_scale in (keys(x, None, 64, mean), fp8(x, None, 64)):
        assert torch.equal(of_slots(tile_scale, 64, 256)[0, 0].isnan(), group)
        assert torch.equal(token_scale[0, 0].isnan(), bad)
    values = in_order(fp8(x, None, 64)[0].float(), 256).isnan()
    assert torch.equal(values[0].all(-1), torch.stack((group, bad)))
    assert torch.equal(values[0].any(-1), torch.stack((group, bad)))

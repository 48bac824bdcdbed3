"""Coarse orders of the keys before a segment: the reference against slow loops, the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.order import coarse_order_triton as kernels
from blocksparse.kernels.order.coarse_order import coarse_order, score_steps
from blocksparse.kernels.order.coarse_order_triton import coarse_order_triton

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def filled(compute: Any, mean: Tensor, k: Tensor, first: int, S: int, count: int, near: int = 0) -> Tensor:
    """What `compute` makes of the last slots of a map, whose segments leave out the `near` keys before them."""
    index = torch.full((*mean.shape[:3], 3 + count), 7, dtype=torch.int32, device=k.device)
    compute(mean, k, first * S - near, S, index[..., 3:])
    assert bool((index[..., :3] == 7).all())
    return index[..., 3:]


def whole_numbers(device: str, H: int, Hkv: int, N: int, G: int, D: int = 16, B: int = 1) -> tuple[Tensor, Tensor]:
    """Mean queries and keys whose products are exact, with many ties."""
    generator = torch.Generator().manual_seed(N + G)
    mean = torch.randint(-3, 4, (B, H, G, D), generator=generator).float()
    k = torch.randint(-3, 4, (B, Hkv, N, D), generator=generator).float()
    return mean.to(device), k.to(device)


def slow_order(mean: Tensor, k: Tensor, start: int, count: int) -> list[int]:
    """One row by the definition, in Python numbers."""
    scores = [float(x) for x in (k[:start].double() @ mean.double())]
    finite = [x for x in scores[7::8] if math.isfinite(x)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def step(score: float) -> int:
        if low == high:
            return 0
        if not math.isfinite(score):
            return 0 if score > 0 else 255
        return max(0, min(255, math.floor((high - score) * (256 / (high - low)))))

    order = sorted(range(start), key=lambda j: (step(scores[j]), j))[:count]
    return order + [-1] * (count - len(order))


CASES: list[tuple[int, int, int, int, int, int, int, int]] = [  # H, Hkv, N, S, first, G, count, near
    (2, 1, 200, 32, 0, 7, 50, 0),
    (3, 1, 130, 24, 1, 5, 1, 0),
    (4, 4, 129, 64, 0, 3, 128, 0),
    (2, 2, 100, 7, 9, 5, 20, 0),
    (1, 1, 65, 64, 1, 1, 64, 0),
    (1, 1, 64, 64, 0, 1, 0, 0),
    (2, 1, 200, 32, 0, 7, 50, 77),
    (2, 2, 100, 7, 9, 5, 90, 1),
    (1, 1, 96, 32, 0, 3, 9, 64),
    (2, 1, 72, 24, 1, 2, 30, 5),
]


@pytest.mark.parametrize(("H", "Hkv", "N", "S", "first", "G", "count", "near"), CASES)
def test_meaning(H: int, Hkv: int, N: int, S: int, first: int, G: int, count: int, near: int, device: str) -> None:
    mean, k = whole_numbers(device, H, Hkv, N, G)
    mean[..., 0] += 0.1 * torch.rand(mean.shape[:3], generator=torch.Generator().manual_seed(0)).to(device)
    mean, k = mean.double(), k.double()
    out = filled(coarse_order, mean, k, first, S, count, near)  # float64 takes the reference everywhere
    for h in range(H):
        for g in range(G):
            assert out[0, h, g].tolist() == slow_order(
                mean[0, h, g], k[0, h // (H // Hkv)], max(0, (first + g) * S - near), count
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("H", "Hkv", "N", "S", "first", "G", "count", "near"),
    [CASES[-1], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[:-1])],
)
def test_kernel_and_reference(
    H: int, Hkv: int, N: int, S: int, first: int, G: int, count: int, near: int, dtype: torch.dtype, device: str
) -> None:
    mean, k = whole_numbers(device, H, Hkv, N, G)
    want = filled(coarse_order.reference, mean, k.to(dtype), first, S, count, near)
    for compute in (coarse_order_triton, coarse_order):
        assert torch.equal(filled(compute, mean, k.to(dtype), first, S, count, near), want)


@pytest.mark.slow
@pytest.mark.parametrize("D", [8, 80, 128])
def test_scores_that_are_rounded(D: int, device: str) -> None:
    """Steps may differ by one where sums are rounded; nothing else does."""
    generator = torch.Generator().manual_seed(D)
    mean = torch.randn((2, 2, 4, D), generator=generator).to(device)
    k = torch.randn((2, 1, 150, D), generator=generator).half().to(device)
    S, count = 37, 60
    got = filled(coarse_order_triton, mean, k, 0, S, count)
    start = S * torch.arange(4, device=device)[:, None]
    scores = torch.matmul(mean.half().double(), k[:, :, :111].double().mT)
    steps = score_steps(scores, start)
    for g in range(4):
        held = min(count, g * S)
        assert bool((got[:, :, g, held:] == -1).all())
        mine = steps[:, :, g].gather(-1, got[:, :, g, :held].long())
        best = steps[:, :, g].sort(-1).values[..., :held]
        assert bool(((mine - best).abs() <= 1).all())
        assert all(len(set(row)) == held for row in got[:, :, g, :held].flatten(0, 1).tolist())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")  # of the interpreter
@pytest.mark.slow
def test_bad_numbers(device: str) -> None:
    """NaN is the least, infinities keep their side, and neither they nor keys between the sampled widen the steps."""
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([1.0, nan, 3.0, -inf, inf, 2.0, 2.999, nan, 0.0, -0.0, 1.5, 3.0, -3e38, 3e38, 1e-45, 7.0])
    mean = torch.zeros(1, 4, 2, 16)
    mean[0, :, :, 0] = torch.tensor([1.0, -1.0, 0.0, nan])[:, None]
    k = torch.zeros(1, 1, 256, 16)
    k[..., 0] = -1.0
    k[0, 0, 0, 0] = 50.0
    k[0, 0, 7:128:8, 0] = odd
    k[0, 0, 135::8, 0] = odd.nan_to_num(posinf=0.0, neginf=0.0).clamp(-9, 9)
    mean, k = mean.to(device), k.to(device)
    for S in (96, 128):
        want = filled(coarse_order.reference, mean, k, 1, S, 16)
        assert torch.equal(filled(coarse_order_triton, mean, k, 1, S, 16), want)
    assert want[0, 3].tolist() == [list(range(16))] * 2
    first = filled(coarse_order.reference, mean, k, 1, 96, 12)[0, 0, 0].tolist()
    assert first == [0, 23, 39, 55, 95, 47, 87, 7, 1, 2, 3, 4]


def test_bits_do_not_depend_on_what_comes_later(device: str) -> None:
    """Nor on which segments a call has, nor on how many are computed at once."""
    generator = torch.Generator().manual_seed(0)
    mean, k = (torch.randn((1, 2, n, 16), generator=generator).to(device) for n in (5, 160))
    whole = filled(coarse_order_triton, mean, k, 0, 32, 40)
    later_mean, later_k = mean.clone(), k.clone()
    later_mean[:, :, 3:], later_k[:, :, 64:] = 9.0, -20.0
    assert torch.equal(filled(coarse_order_triton, later_mean, later_k, 0, 32, 40)[:, :, :3], whole[:, :, :3])
    assert torch.equal(filled(coarse_order_triton, mean[:, :, 2:4], k[:, :, :128], 2, 32, 40), whole[:, :, 2:4])


@pytest.mark.slow
def test_a_few_segments_at_a_time(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    mean, k = whole_numbers(device, 2, 1, 130, 4, B=2)
    for first, near in ((1, 0), (0, 0), (1, 40)):  # in the last two a few segments have no key to order
        want = filled(coarse_order.reference, mean, k, first, 32, 70, near)
        for limit in (1, 2000):
            with monkeypatch.context() as few:
                few.setattr(kernels, "BYTES_AT_ONCE", limit)
                assert torch.equal(filled(coarse_order_triton, mean, k, first, 32, 70, near), want)
        with monkeypatch.context() as few:
            few.setattr("blocksparse.kernels.order.coarse_order._SCORES_AT_ONCE", 1000)
            assert torch.equal(filled(coarse_order.reference, mean, k, first, 32, 70, near), want)


@pytest.mark.slow
def test_small_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Rows of many tiles; ties across them go to the lower position."""
    mean, k = whole_numbers(device, 2, 1, 200, 3, D=2)
    want = filled(coarse_order.reference, mean, k, 1, 64, 90)
    for name, size in (("TILE", 32), ("WIDE", 32), ("NARROW", 16), ("CHUNK", 16), ("PIECE", 2)):
        monkeypatch.setattr(kernels, name, size)
    for chunks in (16, 2, 1):
        monkeypatch.setattr(kernels, "CHUNKS", chunks)
        assert torch.equal(filled(coarse_order_triton, mean, k, 1, 64, 90), want)


@pytest.mark.slow
def test_more_tiles_than_a_byte_counts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    mean, k = whole_numbers(device, 1, 1, 4200, 1, D=2)
    want = filled(coarse_order.reference, mean, k, 1, 4170, 30)
    monkeypatch.setattr(kernels, "TILE", 16)
    assert torch.equal(filled(coarse_order_triton, mean, k, 1, 4170, 30), want)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [100.0, -100.0, 0.0])
def test_samples_that_mislead(odd: float, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The guess sees keys that are all better or worse than the others, or like them."""
    monkeypatch.setattr(kernels, "SAMPLE", 16)
    S = 1090
    apart = -(-S // 16) * 4 // 16 + 1  # words
    k = torch.zeros(1, 1, S, 16)
    k[..., 0] = torch.randint(-50, 50, (S,), generator=torch.Generator().manual_seed(0))
    k[0, 0, torch.arange(S) // 4 % apart == 0, 0] += odd
    mean = torch.zeros(1, 1, 1, 16)
    mean[..., 0] = 1.0
    mean, k = mean.to(device), k.to(device)
    for count in (1, 300, 1000, S):
        want = filled(coarse_order.reference, mean, k, 1, S, count)
        assert torch.equal(filled(coarse_order_triton, mean, k, 1, S, count), want)


@pytest.mark.slow
def test_layouts(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; mean queries may be a slice."""
    mean, k = whole_numbers(device, 2, 1, 100, 3, B=2)
    want = filled(coarse_order.reference, mean, k, 0, 32, 40)
    heads_last = k.transpose(1, 2).contiguous().transpose(1, 2)
    last_axis_apart = k.mT.contiguous().mT
    padded = torch.stack((mean, mean + 1), dim=-1)[..., 0]
    for keys in (heads_last, last_axis_apart):
        assert torch.equal(filled(coarse_order_triton, padded, keys, 0, 32, 40), want)


def test_more_keys_than_positions_have_bits_for() -> None:
    """A step and a position share an int32; the keys here take no memory."""
    q, k = torch.zeros(1, 1, 256, 8), torch.zeros(1, 1, 1, 8).expand(1, 1, 2**24 + 512, 8)
    with pytest.raises(ValueError, match=r"up to 16777216 keys before a segment: 16777472\. Use coarse=False"):
        bs.GlobalIndexMap(256, prefix=16, coarse=True)(q, k, bs.AttentionSpec(scale=1.0))

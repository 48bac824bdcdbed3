"""Orders of keys: exact sorts, importance and mean queries in fp32, and coarse orders beside slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.order import coarse_order_triton as coarse
from blocksparse.kernels.order import segments_triton
from blocksparse.kernels.order.coarse_order import coarse_order, mean_and_products, score_steps
from blocksparse.kernels.order.coarse_order_triton import coarse_order_triton, mean_and_products_triton
from blocksparse.kernels.order.segments import key_importance, segment_sort
from blocksparse.kernels.order.segments_triton import key_importance_triton, segment_sort_triton
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.testing import make_qkv
from tests.kernels.compare import assert_same, draws, randn, transposed

slow = pytest.mark.slow


def within_budget(got: Tensor, same: Tensor, exact: Tensor) -> bool:
    """At most twice the error of plain torch of the same precision, and a rounding."""
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    budget = 2 * float((same.double() - exact).abs().max()) + 4e-6 * float(exact.abs().max())
    return float((got.double() - exact).abs().max()) <= budget


# The order is exactly that of a stable descending torch.sort, or of one of the values' upper bits.


@slow
@pytest.mark.parametrize(
    ("N", "S"),
    [
        *((N, S) for N in (1, 63, 65, 127, 129, 200, 1000) for S in (2, 16)),
        *((2 * S + 3, S) for S in (64, 256, 512)),
    ],
)
def test_lengths_and_segments(N: int, S: int, device: str) -> None:
    for bits in (False, True):
        assert_same(segment_sort, randn(1, 2, N, device=device, seed=N), S, bits)


def test_ties_zeros_nans_and_infinities(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([0.0, -0.0, nan, 1.0, -inf, inf, -nan, 1.0, -1.0, 1e-45, -1e-45, 0.0, -0.0, inf, nan, -1.0])
    values = torch.stack((odd, odd.flip(0), torch.zeros(16), torch.full((16,), nan))).repeat(1, 2)[None, :, :30]
    merged = values.masked_fill(values == 1e-45, 0.0)
    # On the CPU: a GPU's torch takes the NaN of negative sign for the least. 30 values have a tail, too.
    for S in (16, 8):
        got = segment_sort_triton(values.to(device), S).cpu()
        assert torch.equal(got, segment_sort.reference(values, S))
        # Coarse, the two least numbers above and below 0 are 0 and the number below it.
        bits = segment_sort.reference(values, S, True), segment_sort_triton(values.to(device), S, True).cpu()
        assert all(torch.equal(each, segment_sort.reference(merged, S)) for each in bits)


def test_upper_bits(device: str) -> None:
    """Without the lowest 7 bits; what differs in those alone keeps its order, on both sides of 0."""
    steps = 64 * torch.randint(-3, 3, (1, 1, 128), generator=draws()).int()
    for base, flip in ((1.0, 0), (-1.0, 0x7FFFFFFF)):
        rank = (torch.tensor(base).view(torch.int32) ^ flip) + steps
        values, kept = ((x ^ flip).view(torch.float32).to(device) for x in (rank, rank >> 7 << 7))
        want = segment_sort.reference(kept, 128)
        assert torch.equal(assert_same(segment_sort, values, 128, True), want)
        assert not torch.equal(segment_sort.reference(values, 128), want)


@pytest.mark.parametrize("P", [1, 3, 4, 7])
def test_parts_are_added_up(P: int, device: str) -> None:
    parts = torch.rand(2, 2, P, 100, generator=draws()).to(device)
    by_fours = [parts[:, :, first::4].cumsum(2)[:, :, -1] for first in range(min(P, 4))]
    values = torch.stack(by_fours).cumsum(0)[-1]
    assert torch.equal(segment_sort_triton(parts, 16), segment_sort.reference(values, 16))
    whole = parts.mul(64).round()  # sums of integers do not depend on their order
    assert torch.equal(assert_same(segment_sort, whole, 16), segment_sort.reference(whole.sum(2), 16))


def test_few_values_many_ties(device: str) -> None:
    values = torch.randint(0, 3, (1, 2, 300), generator=draws()).float().to(device)
    for bits in (False, True):
        assert torch.equal(segment_sort_triton(values, 128, bits), segment_sort.reference(values, 128))


@pytest.mark.parametrize("S", [1, 48, 1000])
def test_other_segments_take_torchs_sort(S: int, device: str) -> None:
    values = torch.rand(1, 2, 200, generator=draws()).to(device)
    for bits in (False, True):
        assert torch.equal(segment_sort(values, S, coarse=bits), segment_sort.reference(values, S, bits))


# Importance of keys


def assert_importance(
    q: Tensor, k: Tensor, *, last_q: int = 128, seen: int | None = None, scale: float | None = None
) -> None:
    seen, scale = k.shape[2] if seen is None else seen, q.shape[-1] ** -0.5 if scale is None else scale
    for causal, per_query_head in ((True, False), (False, True)):
        rest: tuple[Any, ...] = (last_q, seen, causal, scale, per_query_head)
        exact = key_importance.reference(q.double(), k.double(), *rest).sum(2)
        got = key_importance_triton(q, k, *rest).sum(2)
        assert within_budget(got, key_importance.reference(q, k, *rest).sum(2), exact)
        assert bool((got[..., seen:] == 0).all())


def inputs(device: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    q, k, _ = make_qkv(**{"Hq": 2, "Hkv": 1, "D": 16, **sizes})
    return q.to(device), k.to(device)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, where the first peak is left behind
@pytest.mark.parametrize(
    ("sizes", "asked"),
    [
        *(({"N": N}, {}) for N in (1, 63, 65, 127, 129, 200, 1000)),
        ({"M": 5, "N": 130, "Hkv": 2}, {}),
        ({"M": 64, "N": 200, "Hkv": 2}, {"last_q": 20}),
        ({"N": 200, "Hkv": 2}, {"last_q": 150}),
        ({"N": 100, "Hkv": 2}, {"last_q": 1}),
        *(({"N": 200}, {"last_q": 16, "seen": seen}) for seen in (1, 64, 130, 192)),  # nobody votes on the others
        *(({"N": 200}, {"last_q": 16, "scale": scale}) for scale in (0.0, -0.3, 8.0)),
        *(
            pytest.param({"B": 2, "Hq": 2 * group, "Hkv": 2, "N": 70}, {"last_q": 16}, marks=slow)
            for group in (1, 3, 4, 7)
        ),
        *(
            pytest.param({"Hq": 1, "N": 150, "D": D, "dtype": dtype}, {"last_q": 16}, marks=slow)
            for D in (8, 64, 80, 96, 128, 256)
            for dtype in (torch.float32, torch.float16)
        ),
    ],
    ids=str,
)
def test_importance(sizes: dict[str, Any], asked: dict[str, Any], device: str) -> None:
    assert_importance(*inputs(device, **sizes), **asked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    """Nor is it multiplied in it, which takes a CPU without such products ten times as long."""
    q, k = inputs("cpu", N=70, dtype=dtype)
    half, full = (
        key_importance.reference(*x, 16, 70, True, 0.25, False) for x in ((q, k), (q.float(), k.float()))
    )
    assert torch.equal(half, full)


def test_many_shares_of_the_keys(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Also one in which some queries see no key at all."""
    monkeypatch.setattr(segments_triton, "_PIECES", 1)
    for seen in (None, 100):
        assert_importance(*inputs(device, N=330), last_q=128, seen=seen)


def test_layouts_of_importance(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed."""
    q, k = inputs(device, B=2, Hq=4, Hkv=2, N=100)
    rest = 32, 100, True, 0.25, False
    expected = key_importance_triton(q, k, *rest)
    for axes in ((1, 2), (2, 3)):
        assert torch.equal(key_importance_triton(transposed(q, *axes), transposed(k, *axes), *rest), expected)


def test_equal_keys_weigh_the_same(device: str) -> None:
    """In whatever tile or share of the keys they stand, so that ties stay ties."""
    q, k = inputs(device, N=1000)
    weight = key_importance_triton(q, k[:, :, :1].expand_as(k), 16, 1000, False, 0.25, False)
    assert bool((weight == weight[..., :1]).all())


# Mean queries of segments, and products with one vector per KV head


def assert_means_and_products(q: Tensor, guide: Tensor, S: int, lead: int = 0) -> None:
    exact = mean_and_products.reference(q.double(), guide.double(), S, lead)
    same = mean_and_products.reference(q, guide, S, lead)
    assert all(map(within_budget, mean_and_products_triton(q, guide, S, lead), same, exact))


def guided(device: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    q, k = inputs("cpu", **sizes)
    return q.to(device), k.float().mean(2).to(device)


@pytest.mark.parametrize(
    ("M", "S", "lead"),
    [*((M, 64, 0) for M in (1, 63, 65, 200)), *((M, 16, lead) for M in (1, 12, 40) for lead in (1, 5, 15))],
)
@pytest.mark.parametrize("group", [1, 3])
def test_mean_queries(M: int, S: int, lead: int, group: int, device: str) -> None:
    assert_means_and_products(*guided(device, B=2, Hq=2 * group, Hkv=2, N=M), S, lead)


@slow
@pytest.mark.parametrize(("S", "N"), [(1, 7), (24, 70), (300, 70)])
@pytest.mark.parametrize("D", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mean_queries_of_head_dims_and_layouts(D: int, S: int, N: int, dtype: torch.dtype, device: str) -> None:
    q, guide = guided(device, N=N, D=D)
    q = q.to(dtype)
    assert_means_and_products(q, guide, S)
    want = mean_and_products_triton(q, guide, S, 0)
    for axes in ((1, 2), (2, 3)):
        assert all(map(torch.equal, mean_and_products_triton(transposed(q, *axes), guide, S, 0), want))


@pytest.mark.parametrize("D", [16, 128])
def test_bits_do_not_depend_on_what_else_a_call_has(D: int, device: str) -> None:
    """Other segments, and the end of the queries."""
    q, guide = guided(device, Hq=1, N=210, D=D)
    mean, products = mean_and_products_triton(q, guide, 64, 0)
    for some in (slice(0, 128), slice(64, 210)):
        part, product = mean_and_products_triton(q[:, :, some], guide, 64, 0)
        assert torch.equal(product, products[:, :, some])
        assert torch.equal(part, mean[:, :, some.start // 64 : -(-some.stop // 64)])


def test_the_mean_is_that_of_blocks(device: str) -> None:
    q, guide = guided(device, N=100)
    torch.testing.assert_close(mean_and_products(q, guide, 32, lead=7)[0], block_mean(q, 32, lead=7))


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_infinite_and_undefined_queries(device: str) -> None:
    """They spoil their own segment and their own product, and no other."""
    q, guide = guided(device, Hq=1, N=70)
    q[0, 0, 3, 2], q[0, 0, 40, 1] = float("nan"), float("inf")
    both = (compute(q, guide, 16, 0) for compute in (mean_and_products_triton, mean_and_products.reference))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


# Coarse orders of the keys before a segment


def filled(compute: Any, mean: Tensor, k: Tensor, first: int, S: int, count: int, near: int = 0) -> Tensor:
    """What `compute` makes of the last slots of a map, whose segments leave out the `near` keys before them."""
    index = torch.full((*mean.shape[:3], 3 + count), 7, dtype=torch.int32, device=k.device)
    compute(mean, k, first * S - near, S, index[..., 3:])
    assert bool((index[..., :3] == 7).all())
    return index[..., 3:]


def assert_filled(*given: Any) -> Tensor:
    want = filled(coarse_order.reference, *given)
    assert torch.equal(filled(coarse_order_triton, *given), want)
    return want


def whole_numbers(device: str, H: int, Hkv: int, N: int, G: int, D: int = 16, B: int = 1) -> tuple[Tensor, Tensor]:
    """Mean queries and keys whose products are exact, with many ties."""
    generator = draws(N + G)
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


CASES: list[tuple[int, ...]] = [  # H, Hkv, N, S, first, G, count, near
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_coarse_order_means(case: tuple[int, ...], device: str) -> None:
    H, Hkv, N, S, first, G, count, near = case
    mean, k = whole_numbers(device, H, Hkv, N, G)
    mean[..., 0] += 0.1 * torch.rand(mean.shape[:3], generator=draws()).to(device)
    mean, k = mean.double(), k.double()
    out = filled(coarse_order, mean, k, first, S, count, near)  # float64 takes the reference everywhere
    for h in range(H):
        for g in range(G):
            want = slow_order(mean[0, h, g], k[0, h // (H // Hkv)], max(0, (first + g) * S - near), count)
            assert out[0, h, g].tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", [CASES[-1], *(pytest.param(case, marks=slow) for case in CASES[:-1])], ids=str)
def test_coarse_order(case: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    H, Hkv, N, S, first, G, count, near = case
    mean, k = whole_numbers(device, H, Hkv, N, G)
    given = mean, k.to(dtype), first, S, count, near
    assert torch.equal(filled(coarse_order, *given), assert_filled(*given))


@slow
@pytest.mark.parametrize("D", [8, 80, 128])
def test_scores_that_are_rounded(D: int, device: str) -> None:
    """Steps may differ by one where sums are rounded; nothing else does."""
    mean, k = randn(2, 2, 4, D, device=device), randn(2, 1, 150, D, device=device, dtype=torch.half, seed=1)
    S, count = 37, 60
    got = filled(coarse_order_triton, mean, k, 0, S, count)
    scores = torch.matmul(mean.half().double(), k[:, :, :111].double().mT)
    steps = score_steps(scores, S * torch.arange(4, device=device)[:, None])
    for g in range(4):
        held = min(count, g * S)
        assert bool((got[:, :, g, held:] == -1).all())
        mine = steps[:, :, g].gather(-1, got[:, :, g, :held].long())
        best = steps[:, :, g].sort(-1).values[..., :held]
        assert bool(((mine - best).abs() <= 1).all())
        assert all(len(set(row)) == held for row in got[:, :, g, :held].flatten(0, 1).tolist())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")  # of the interpreter
@slow
def test_bad_numbers(device: str) -> None:
    """NaN is the least, infinities keep their side, and neither they nor keys between the sampled widen the steps."""
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([1.0, nan, 3.0, -inf, inf, 2.0, 2.999, nan, 0.0, -0.0, 1.5, 3.0, -3e38, 3e38, 1e-45, 7.0])
    mean, k = torch.zeros(1, 4, 2, 16), torch.zeros(1, 1, 256, 16)
    mean[0, :, :, 0] = torch.tensor([1.0, -1.0, 0.0, nan])[:, None]
    k[..., 0] = -1.0
    k[0, 0, 0, 0] = 50.0
    k[0, 0, 7:128:8, 0] = odd
    k[0, 0, 135::8, 0] = odd.nan_to_num(posinf=0.0, neginf=0.0).clamp(-9, 9)
    want = {S: assert_filled(mean.to(device), k.to(device), 1, S, 16) for S in (96, 128)}
    assert want[128][0, 3].tolist() == [list(range(16))] * 2
    assert want[96][0, 0, 0, :12].tolist() == [0, 23, 39, 55, 95, 47, 87, 7, 1, 2, 3, 4]


def test_bits_do_not_depend_on_what_comes_later(device: str) -> None:
    """Nor on which segments a call has, nor on how many are computed at once."""
    mean, k = (randn(1, 2, n, 16, device=device, seed=n) for n in (5, 160))
    whole = filled(coarse_order_triton, mean, k, 0, 32, 40)
    later_mean, later_k = mean.clone(), k.clone()
    later_mean[:, :, 3:], later_k[:, :, 64:] = 9.0, -20.0
    assert torch.equal(filled(coarse_order_triton, later_mean, later_k, 0, 32, 40)[:, :, :3], whole[:, :, :3])
    assert torch.equal(filled(coarse_order_triton, mean[:, :, 2:4], k[:, :, :128], 2, 32, 40), whole[:, :, 2:4])


@slow
def test_a_few_segments_at_a_time(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    mean, k = whole_numbers(device, 2, 1, 130, 4, B=2)
    for first, near in ((1, 0), (0, 0), (1, 40)):  # in the last two a few segments have no key to order
        given = mean, k, first, 32, 70, near
        want = filled(coarse_order.reference, *given)
        for at_once in (1, 2000):
            with monkeypatch.context() as few:
                few.setattr(coarse, "BYTES_AT_ONCE", at_once)
                few.setattr("blocksparse.kernels.order.coarse_order._SCORES_AT_ONCE", 1000)
                assert torch.equal(assert_filled(*given), want)


@slow
def test_small_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Rows of many tiles; ties across them go to the lower position."""
    mean, k = whole_numbers(device, 2, 1, 200, 3, D=2)
    for name, size in (("TILE", 32), ("WIDE", 32), ("NARROW", 16), ("CHUNK", 16), ("PIECE", 2)):
        monkeypatch.setattr(coarse, name, size)
    for chunks in (16, 2, 1):
        monkeypatch.setattr(coarse, "CHUNKS", chunks)
        assert_filled(mean, k, 1, 64, 90)


@slow
def test_more_tiles_than_a_byte_counts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(coarse, "TILE", 16)
    assert_filled(*whole_numbers(device, 1, 1, 4200, 1, D=2), 1, 4170, 30)


@slow
@pytest.mark.parametrize("odd", [100.0, -100.0, 0.0])
def test_samples_that_mislead(odd: float, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The guess sees keys that are all better or worse than the others, or like them."""
    monkeypatch.setattr(coarse, "SAMPLE", 16)
    S = 1090
    apart = -(-S // 16) * 4 // 16 + 1  # words
    mean, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, S, 16)
    mean[..., 0], k[..., 0] = 1.0, torch.randint(-50, 50, (S,), generator=draws())
    k[0, 0, torch.arange(S) // 4 % apart == 0, 0] += odd
    for count in (1, 300, 1000, S):
        assert_filled(mean.to(device), k.to(device), 1, S, count)


@slow
def test_layouts(device: str) -> None:
    """Hosts hand over `[B, N, H, D]` transposed; mean queries may be a slice."""
    mean, k = whole_numbers(device, 2, 1, 100, 3, B=2)
    want = filled(coarse_order.reference, mean, k, 0, 32, 40)
    padded = torch.stack((mean, mean + 1), dim=-1)[..., 0]
    for axes in ((1, 2), (2, 3)):
        assert torch.equal(filled(coarse_order_triton, padded, transposed(k, *axes), 0, 32, 40), want)


def test_more_keys_than_positions_have_bits_for() -> None:
    """A step and a position share an int32; the keys here take no memory."""
    q, k = torch.zeros(1, 1, 256, 8), torch.zeros(1, 1, 1, 8).expand(1, 1, 2**24 + 512, 8)
    with pytest.raises(ValueError, match=r"up to 16777216 keys before a segment: 16777472\. Use coarse=False"):
        bs.GlobalIndexMap(256, prefix=16, coarse=True)(q, k, bs.AttentionSpec(scale=1.0))

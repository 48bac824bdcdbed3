"""Cells of tokens: their means, their mass and their best products. Triton kernels against references in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.gemm.pooled_sums_triton import PooledTiles
from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.kernels.gemm.strided_products_triton import ProductTiles
from blocksparse.kernels.score import cpu_scores, strided_mass_triton, strided_means_triton
from blocksparse.kernels.score.strided_mass import strided_mass
from blocksparse.kernels.score.strided_means import group_max, strided_mean, strided_means
from blocksparse.testing import make_qkv
from tests.cases import slow
from tests.kernels.compare import draws, order
from tests.machine import DTYPES

SMALL = ProductTiles(32, 32, 32, 4, 2)  # several tiles in a short prompt
SMALL_POOLED = PooledTiles(32, 32, 4, 2)
OF_A_GPU = ProductTiles(128, 128, 64, 8, 3)  # of the size that a GPU takes
HALF = torch.float16


def qk(device: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    q, k, _ = make_qkv(**{"Hq": 2, "Hkv": 1, "D": 16, **sizes}, device=device)
    return q, k


def pooled(q: Tensor, k: Tensor, **given: Any) -> dict[str, Any]:
    """Arguments of an operation, those that say what a cell is in one."""
    of = {each.name: given.pop(each.name) for each in attrs.fields(StridedPooling) if each.name in given}
    return {"q": q, "k": k, "of": StridedPooling(**of), **given}


def of_mass(q: Tensor, k: Tensor, slots: int = 4, *, causal: bool = True, **changed: Any) -> dict[str, Any]:
    offset = k.shape[2] - q.shape[2] if causal else 0
    given = {
        "slots": slots, "first_cell": offset // slots, "q_lead": offset % slots, "high": 4, "wide": 4, "causal": causal,
        "segment": None, "weight": q.shape[-1] ** -0.5 / slots, "flipped": True, "padded_tail": False, "joint": False,
    }  # fmt: skip
    return pooled(q, k, **given | changed)


def of_groups(q: Tensor, k: Tensor, g: int = 8, *, high: int = 4, causal: bool = True, **changed: Any) -> Any:
    offset, block = k.shape[2] - q.shape[2] if causal else 0, g * high
    given = {
        "slots": g, "first_row": offset // block, "q_lead": offset % block, "high": high, "wide": 4, "causal": causal,
        "per_token": False, "padded_tail": False,
    }  # fmt: skip
    return pooled(q, k, **given | changed)


def wide(given: dict[str, Any]) -> dict[str, Any]:
    floats = {name for name, x in given.items() if isinstance(x, Tensor)}
    return {name: x.double() if name in floats else x for name, x in given.items()}


# Means of cells


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.slow), *DTYPES[1:]], ids=str)
@pytest.mark.parametrize(
    ("slots", "lead", "N", "D"),
    [
        (4, 3, 61, 16),
        (8, 0, 64, 24),
        (16, 5, 9, 16),
        (1, 0, 5, 16),
        pytest.param(40, 0, 85, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("padded_tail", [False, True])
def test_means_have_the_bits_of_the_reference(
    padded_tail: bool, slots: int, lead: int, N: int, D: int, dtype: torch.dtype, device: str
) -> None:
    M = max(N - 2, 1)
    q, k, _ = make_qkv(B=2, Hq=4, Hkv=2, N=N, M=M, D=D, dtype=dtype, device=device)
    for q_index, k_index in ((None, None), (order(2, 4, M), order(2, 4, N))):
        both = strided_means.kernel()(q, k, slots, lead, padded_tail, _to(device, q_index), _to(device, k_index))
        for x, got, first, index in ((q, both[0], lead, q_index), (k, both[1], 0, k_index)):
            want = strided_mean.reference(x.cpu(), slots, first, padded_tail, index)
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
            alone = strided_mean.kernel()(x, slots, first, padded_tail, _to(device, index))
            assert torch.equal(alone, got)


def _to(device: str, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_means_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, _ = make_qkv(Hq=2, Hkv=1, N=45, M=38, D=8, dtype=dtype)
    for x, got, lead in zip((q, k), strided_means(q, k, 8, lead=3), (3, 0), strict=True):
        cells = x.double().split([8 - lead, *[8] * ((x.shape[2] - 8 + lead) // 8), (x.shape[2] + lead) % 8], dim=2)
        want = torch.stack([cell.mean(2) for cell in cells if cell.shape[2]], dim=2)
        assert got.dtype == dtype
        # Half of the last place, and what sums in fp32 lose.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=1e-7)


# The best product of groups


def assert_best(given: dict[str, Any], tiles: ProductTiles | None) -> Tensor:
    got = strided_means_triton.group_max_triton(**given, tiles=tiles)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), group_max.reference(**wide(given)), rtol=1e-5, atol=1e-4)
    return got


TINY = ProductTiles(16, 16, 32, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "asked", "tiles"),
    [
        *(({"N": 150, "M": 77}, {"g": 4, "high": high, "wide": wide}, TINY)
          for high, wide in ((1, 1), (1, 4), (8, 2), (16, 16))),
        *slow(*(({"N": N, "D": 32, "dtype": dtype}, {}, TINY)
                for dtype in DTYPES for N in (1, 63, 65, 127, 129, 200, 256))),
        *slow(*(({"B": 2, "N": 141, "M": M}, {"causal": causal, "per_token": x, "padded_tail": y}, TINY)
                for M in (1, 30, 65, 128) for causal in (True, False) for x in (False, True) for y in (False, True))),
        *slow(*(({"N": 70, "D": D, "dtype": HALF}, {"high": 2, "wide": 2}, None) for D in (64, 80, 96, 128, 256))),
        *slow(*(({"N": N, "M": M, "D": 64, "dtype": HALF}, {"g": 4}, OF_A_GPU)
                for N, M in ((1000, 1000), (1024, 1024), (1000, 615)))),
    ],
    ids=str,
)  # fmt: skip
def test_best_products(sizes: dict[str, Any], asked: dict[str, Any], tiles: Any, device: str) -> None:
    assert_best(of_groups(*qk(device, **sizes), **asked), tiles)


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 1), (8, 2), (7, 1)])
@pytest.mark.parametrize("per_head", [False, True])
def test_best_products_in_any_order(Hq: int, Hkv: int, per_head: bool, device: str) -> None:
    first = (torch.rand(1, Hq if per_head else 1, 16, generator=draws()) * 128).int().to(device)
    last = torch.arange(31, 128, 32, dtype=torch.int32, device=device).view(1, 1, -1)
    got = assert_best(of_groups(*qk(device, N=128, Hq=Hq, Hkv=Hkv), q_last=last, k_first=first), TINY)
    assert bool((got == float("-inf")).any())


# Mass


def assert_mass(given: dict[str, Any], tiles: ProductTiles | PooledTiles | None = SMALL) -> Tensor:
    if given["of"].slots == 1 and tiles is SMALL:
        tiles = SMALL_POOLED
    got = strided_mass_triton.strided_mass_triton(**given, tiles=tiles)
    assert got.dtype == torch.float32
    # What fills a short cell is rounded to the precision of its tokens.
    rounding = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 1e-2}[given["q"].dtype]
    want = strided_mass.reference(**wide(given))
    torch.testing.assert_close(got.double(), want, rtol=1e-4 + rounding, atol=1e-6 + rounding / 10)
    return got


@pytest.mark.parametrize(
    ("sizes", "size", "asked", "tiles"),
    [
        *(({"N": 130, "M": M}, 8, {"causal": causal}, SMALL)
          for M, causal in ((1, True), (30, False), (65, True), (128, True))),
        ({"N": 96, "Hq": 1}, 300, {}, SMALL),  # a cell that beats another by hundreds takes all the mass
        *slow(*(({"B": 2, "N": 143, "M": 122, "Hkv": 2}, 8, asked, SMALL) for asked in (
            {"flipped": False}, {"padded_tail": True}, {"segment": 8}, {"high": 3, "wide": 8}, {"high": 16, "wide": 1},
            {"slots": 16, "high": 1, "wide": 2}, {"joint": True, "high": 3},
        ))),
        *slow(*(({"N": 70, "D": D, "dtype": HALF}, 4, {"slots": 8, "high": 2, "wide": 2}, None)
                for D in (64, 80, 96, 128, 256))),
        *slow(*(({"N": N, "M": M, "D": 64, "dtype": HALF}, 4, {"high": 8, "wide": 8, "segment": segment}, OF_A_GPU)
                for N, M, segment in ((1000, 1000, None), (1024, 1024, 64), (1000, 615, None)))),
    ],
    ids=str,
)  # fmt: skip
def test_mass(sizes: dict[str, Any], size: float, asked: dict[str, Any], tiles: Any, device: str) -> None:
    q, k = qk(device, **sizes)
    assert_mass(of_mass(size * q, k, **asked), tiles)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("joint", [False, True])
def test_what_is_not_finite_spoils_the_same_rows(joint: bool, where: str, value: float, device: str) -> None:
    """A query cell that sees it has no weights at all, as in plain torch, and not those of its other keys alone."""
    q, k = qk(device, N=130, Hq=4, Hkv=2)
    (k if where == "k" else q)[0, 0, 70] = value
    given = of_mass(q, k, joint=joint)
    got, want = strided_mass_triton.strided_mass_triton(**given, tiles=SMALL), strided_mass.reference(**given)
    seen = torch.ones_like(want).tril()[0, 0].bool()  # beyond it nothing is ever kept
    assert 0 < int(want[0, 0].isnan()[seen].sum()) < int(seen.sum())
    torch.testing.assert_close(got[..., seen], want[..., seen], rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("changed", [{}, {"segment": 8}, {"joint": True}], ids=str)
def test_a_cell_whose_logits_are_all_minus_infinity_holds_no_mass(changed: dict[str, Any], device: str) -> None:
    """As one that reaches no key; the other cells of its row of blocks keep theirs, in kernels as in plain torch."""
    q, k = qk(device, N=130, Hq=4, Hkv=2)
    k[..., 3] = k[..., 3].abs() + 0.1
    finite = strided_mass.reference(**of_mass(q, k, **changed))[0, 0, 70 // 16]
    q[0, 0, 70, 3] = -float("inf")
    given, joint = of_mass(q, k, **changed), "joint" in changed
    want = strided_mass.reference(**given)
    cells = want.new_tensor(1.0 if joint else 3.0)  # of four; all share a mass of 1 if joint
    torch.testing.assert_close(want[0, 0, 70 // 16].sum(), cells, rtol=1e-5, atol=0)
    assert joint or bool((want[0, 0, 70 // 16] <= finite + 1e-6).all())
    kernels: list[Any] = [partial(strided_mass_triton.strided_mass_triton, tiles=SMALL)]
    if not joint and cpu_scores.takes(q, k):
        kernels.append(cpu_scores.strided_mass_on_cpu)
    seen = torch.ones_like(want).tril()[0, 0].bool()  # beyond it nothing is ever kept
    for kernel in kernels:
        torch.testing.assert_close(kernel(**given)[..., seen], want[..., seen], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("M", [70, 45])
def test_queries_of_a_row_together(M: int, device: str) -> None:
    """Each query with mean keys that end before it: one softmax for all queries of a row, which may see none."""
    q, k = qk(device, N=70, M=M)
    spec = bs.AttentionSpec(scale=0.5)
    want = bs.QueryRowsScorer(16)(q.double().cpu(), k.double().cpu(), bs.GlobalPermutation(), spec).values
    of: dict[str, Any] = {"high": 16, "wide": 1, "q_lead": 0, "joint": True, "weight": 0.5}
    offset = 70 - M
    means = torch.stack([part.mean(2) for part in k.split(16, dim=2)], 2)
    q_last = torch.arange(offset, 70, dtype=torch.int32, device=device).view(1, 1, -1)
    k_first = torch.tensor([[[15, 31, 47, 63, 69]]], dtype=torch.int32, device=device)
    got = assert_mass(of_mass(q, means, 1, **of, first_cell=offset, q_last=q_last, k_first=k_first))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)
    assert bool((got[:, :, 0].sum(-1) < 1.5).all())


@pytest.mark.parametrize("changed", [
    {}, {"causal": False}, {"segment": 32}, {"high": 3, "wide": 8}, {"high": 16, "wide": 1}, {"high": 40, "wide": 1}, {"behind": 20},
], ids=repr)  # fmt: skip
@pytest.mark.parametrize(("N", "M"), [(143, 122), (97, 1), pytest.param(128, 128, marks=pytest.mark.slow)])
def test_cells_of_one_slot(N: int, M: int, changed: dict[str, Any], device: str) -> None:
    """Pooled tokens take a kernel of their own: whole tiles, tiles that reach none or some, spans of one and more."""
    q, k = qk(device, B=2, N=N, M=M, D=24, dtype=HALF)
    got = assert_mass(of_mass(8 * q, k, 1, flipped=False, **changed))
    if changed.get("causal", True) and "segment" not in changed:
        assert bool((got.sum((2, 3)) - M).abs().max() < 1e-2)


@pytest.mark.parametrize(("M", "window"), [(300, None), (145, None), (30, None), (300, 50), (145, 20)])
def test_sampled_queries(M: int, window: int | None, device: str) -> None:
    """In order, as by positions; the CPU's kernel, the GPU's, and a last row without a sample."""
    q, k = qk(device, N=300, M=M, Hq=4, Hkv=2)
    offset, (every, block) = 300 - M, (16, 32)
    first, last_row = (offset + every) // every - 1, 300 // block
    sampled = slice((first + 1) * every - 1 - offset, None, every)
    q = q[:, :, sampled]
    q_last = torch.arange(offset, 300, dtype=torch.int32, device=device)[sampled].contiguous().view(1, 1, -1)
    keys = torch.arange(300, dtype=torch.int32, device=device).view(1, 1, -1)
    of: dict[str, Any] = {"high": block // every, "wide": block, "q_lead": 0, "weight": 0.5, "flipped": False}
    placed: dict[str, Any] = {"q_last": q_last, "k_first": keys}
    if window is not None:
        placed |= {"q_floor": q_last - window, "k_last": keys}
    behind = None if window is None else window - 1
    floor = torch.rand(1, 4, last_row - offset // block + 1, -(-300 // block), device=device)
    more: dict[str, Any] = of | {"first_cell": first, "floor": floor, "factor": 0.5}
    ordered = of_mass(q, k, 1, **more, every=every, behind=behind)
    got = assert_mass(ordered)
    torch.testing.assert_close(got, assert_mass(of_mass(q, k, 1, **more, **placed)))
    alone = assert_mass(of_mass(q, k, 1, **of, first_cell=first, every=every, behind=behind))
    assert bool((got >= floor).all())
    torch.testing.assert_close(got[:, :, : alone.shape[2]], floor[:, :, : alone.shape[2]].maximum(0.5 * alone))
    q, k = ordered.pop("q"), ordered.pop("k")
    torch.testing.assert_close(strided_mass(q, k, **ordered), got, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@pytest.mark.parametrize("windowed", [False, True])
def test_orders_of_cells_of_one_slot(
    windowed: bool, heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided_mass_triton, "_PROGRAMS", 8)  # so that a program meets several tiles
    q, k = qk(device, N=160, Hq=4, Hkv=2)
    near = torch.arange(160).float() + 24 * torch.rand(1, heads, 160, generator=draws())
    first = near.argsort(-1).int().to(device)  # neighbours trade places: tiles are whole, partly and not reached
    last = torch.arange(160, dtype=torch.int32, device=device).view(1, 1, -1)
    first[..., 0] = 0
    window: dict[str, Any] = {"q_floor": last - 48, "k_last": first} if windowed else {}
    assert_mass(of_mass(8 * q, k, 1, flipped=False, q_last=last, k_first=first, **window))


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 1), (8, 2), (7, 1)])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_orders(Hq: int, Hkv: int, heads: int, device: str) -> None:
    """Positions of any order, for all heads, each KV head or each query head; whole tiles are out of reach."""
    heads = {1: 1, 2: Hkv, 8: Hq}[heads]
    q, k = qk(device, N=128, Hq=Hq, Hkv=Hkv)
    first = (torch.rand(1, heads, 32, generator=draws()) * 128).int().to(device)
    first[..., 0] = 0  # every query reaches a cell
    last = torch.arange(3, 128, 4, dtype=torch.int32, device=device).view(1, 1, -1)
    assert_mass(of_mass(8 * q, k, q_last=last, k_first=first))


def exact_qk(device: str, **sizes: Any) -> list[Tensor]:
    """Queries and keys in steps of 1/8: fp32 adds their products exactly, in whichever order a library does that."""
    return [(8 * x).round() / 8 for x in qk(device, **sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("workspace", [1, 2**13])
def test_bands_and_spans_do_not_change_mass(
    workspace: int, slots: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = exact_qk(device, N=200, M=150)
    tiles: Any = SMALL if slots > 1 else SMALL_POOLED
    run = partial(strided_mass_triton.strided_mass_triton, **of_mass(8 * q, k, slots), tiles=tiles)
    whole = run()
    monkeypatch.setattr(strided_mass_triton, "_WORKSPACE", workspace)
    monkeypatch.setattr(strided_mass_triton, "_PROGRAMS", 4)
    assert torch.equal(run(), whole)


@pytest.mark.slow
@pytest.mark.parametrize("high", [8, 64])
def test_mass_does_not_depend_on_what_comes_later(high: int, device: str) -> None:
    """Cells have the same bits in a short prompt as in a long one, of more tiles than are added up at once."""
    tiles = 70 if high == 8 else 36  # of 64 and of 16 at once
    q, k = exact_qk(device, N=tiles * 32, Hq=1)
    run = partial(strided_mass_triton.strided_mass_triton, tiles=SMALL_POOLED)
    whole = run(**of_mass(4 * q, k, 1, high=high))
    for end, M in ((34 * 32, 64), (4 * 32, 128)):
        got = run(**of_mass(4 * q[:, :, end - M : end], k[:, :, :end], 1, high=high))
        assert torch.equal(got, whole[:, :, (end - M) // high : end // high, : end // 4])

"""Mass of blocks of cells: the Triton kernels against the reference in float64."""

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
from blocksparse.kernels.score import cpu_scores, strided_mass_triton
from blocksparse.kernels.score.strided_mass import strided_mass
from blocksparse.testing import make_qkv
from tests.machine import DTYPES

SMALL = ProductTiles(32, 32, 32, 4, 2)  # several tiles in a short prompt
SMALL_POOLED = PooledTiles(32, 32, 4, 2)


def arguments(
    q: Tensor, k: Tensor, slots: int = 4, *, high: int = 4, wide: int = 4, **changed: Any
) -> dict[str, Any]:
    causal = changed.get("causal", True)
    offset = k.shape[2] - q.shape[2] if causal else 0
    given = {
        "q": q, "k": k, "q_last": None, "k_first": None, "slots": slots, "first_cell": offset // slots,
        "q_lead": offset % slots, "high": high, "wide": wide, "causal": causal, "segment": None,
        "weight": q.shape[-1] ** -0.5 / slots, "flipped": True, "padded_tail": False, "joint": False,
    }  # fmt: skip
    given |= changed
    of = StridedPooling(
        **{each.name: given.pop(each.name) for each in attrs.fields(StridedPooling) if each.name in given}
    )
    return {**given, "of": of}


def assert_right(given: dict[str, Any], tiles: ProductTiles | PooledTiles | None = SMALL) -> Tensor:
    if given["of"].slots == 1 and tiles is SMALL:
        tiles = SMALL_POOLED
    got = strided_mass_triton.strided_mass_triton(**given, tiles=tiles)
    wide: dict[str, Any] = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    want = strided_mass.reference(**wide)
    assert got.dtype == torch.float32
    # What fills a short cell is rounded to the precision of its tokens.
    rounding = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 1e-2}[given["q"].dtype]
    torch.testing.assert_close(got.double(), want, rtol=1e-4 + rounding, atol=1e-6 + rounding / 10)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 63, 65, 127, 129, 200])
def test_lengths(N: int, dtype: torch.dtype, device: str) -> None:
    q, k, _ = make_qkv(N=N, Hq=2, Hkv=1, D=32, dtype=dtype, device=device)
    got = assert_right(arguments(4 * q, k))
    cells_in_row = torch.full((got.shape[2],), 4.0, device=device)
    cells_in_row[-1] = -(-N // 4) - 4 * (got.shape[2] - 1)
    torch.testing.assert_close(got.sum(-1), cells_in_row.expand(got.shape[:3]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("M", "causal"), [(1, True), (30, False), (65, True), (128, True)])
def test_chunks(M: int, causal: bool, device: str) -> None:
    q, k, _ = make_qkv(N=130, M=M, Hq=2, Hkv=1, D=16, device=device)
    assert_right(arguments(8 * q, k, causal=causal))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("joint", [False, True])
def test_what_is_not_finite_spoils_the_same_rows(joint: bool, where: str, value: float, device: str) -> None:
    """A query cell that sees it has no weights at all, as in plain torch, and not those of its other keys alone."""
    q, k, _ = make_qkv(N=130, Hq=4, Hkv=2, D=16, device=device)
    (k if where == "k" else q)[0, 0, 70] = value
    given = arguments(q, k, joint=joint)
    got, want = strided_mass_triton.strided_mass_triton(**given, tiles=SMALL), strided_mass.reference(**given)
    seen = torch.ones_like(want).tril()[0, 0].bool()  # beyond it nothing is ever kept
    assert 0 < int(want[0, 0].isnan()[seen].sum()) < int(seen.sum())
    torch.testing.assert_close(got[..., seen], want[..., seen], rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("changed", [{}, {"segment": 8}, {"joint": True}], ids=str)
def test_a_cell_whose_logits_are_all_minus_infinity_holds_no_mass(changed: dict[str, Any], device: str) -> None:
    """As one that reaches no key; the other cells of its row of blocks keep theirs, in kernels as in plain torch."""
    q, k, _ = make_qkv(N=130, Hq=4, Hkv=2, D=16, device=device)
    k[..., 3] = k[..., 3].abs() + 0.1
    finite = strided_mass.reference(**arguments(q, k, **changed))[0, 0, 70 // 16]
    q[0, 0, 70, 3] = -float("inf")
    given, joint = arguments(q, k, **changed), "joint" in changed
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
    q, k, _ = make_qkv(N=70, M=M, Hq=2, Hkv=1, D=16, device=device)
    scorer = bs.QueryRowsScorer(16)
    spec = bs.AttentionSpec(scale=0.5)
    want = scorer(q.double().cpu(), k.double().cpu(), bs.GlobalPermutation(), spec).values
    of: dict[str, Any] = {"high": 16, "wide": 1, "q_lead": 0, "joint": True, "weight": 0.5}
    offset = 70 - M
    means = torch.stack([part.mean(2) for part in k.split(16, dim=2)], 2)
    q_last = torch.arange(offset, 70, dtype=torch.int32, device=device).view(1, 1, -1)
    k_first = torch.tensor([[[15, 31, 47, 63, 69]]], dtype=torch.int32, device=device)
    got = assert_right(arguments(q, means, 1, **of, first_cell=offset, q_last=q_last, k_first=k_first))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)
    assert bool((got[:, :, 0].sum(-1) < 1.5).all())


@pytest.mark.slow
@pytest.mark.parametrize("changed", [
    {"flipped": False}, {"padded_tail": True}, {"segment": 8}, {"high": 3, "wide": 8}, {"high": 16, "wide": 1},
    {"slots": 16, "high": 1, "wide": 2}, {"joint": True, "high": 3},
], ids=repr)  # fmt: skip
def test_options(changed: dict[str, Any], device: str) -> None:
    q, k, _ = make_qkv(B=2, N=143, M=122, Hq=2, Hkv=2, D=16, device=device)
    assert_right(arguments(8 * q, k, **changed))


@pytest.mark.parametrize("changed", [
    {}, {"causal": False}, {"segment": 32}, {"high": 3, "wide": 8}, {"high": 16, "wide": 1}, {"high": 40, "wide": 1}, {"behind": 20},
], ids=repr)  # fmt: skip
@pytest.mark.parametrize(("N", "M"), [(143, 122), (128, 128), (97, 1)])
def test_cells_of_one_slot(N: int, M: int, changed: dict[str, Any], device: str) -> None:
    """Pooled tokens take a kernel of their own: whole tiles, tiles that reach none or some, spans of one and more."""
    q, k, _ = make_qkv(B=2, N=N, M=M, Hq=2, Hkv=1, D=24, dtype=torch.float16, device=device)
    got = assert_right(arguments(8 * q, k, 1, flipped=False, **changed))
    if changed.get("causal", True) and "segment" not in changed:
        assert bool((got.sum((2, 3)) - M).abs().max() < 1e-2)


@pytest.mark.parametrize(("M", "window"), [(300, None), (145, None), (30, None), (300, 50), (145, 20)])
def test_sampled_queries(M: int, window: int | None, device: str) -> None:
    """In order, as by positions; the CPU's kernel, the GPU's, and a last row without a sample."""
    q, k, _ = make_qkv(N=300, M=M, Hq=4, Hkv=2, D=16, device=device)
    offset, (every, block) = 300 - M, (16, 32)
    first, last_row = (offset + every) // every - 1, 300 // block
    sampled = slice((first + 1) * every - 1 - offset, None, every)
    rows = last_row - offset // block + 1
    q_last = torch.arange(offset, 300, dtype=torch.int32, device=device)[sampled].contiguous().view(1, 1, -1)
    keys = torch.arange(300, dtype=torch.int32, device=device).view(1, 1, -1)
    of: dict[str, Any] = {"high": block // every, "wide": block, "q_lead": 0, "weight": 0.5, "flipped": False}
    placed: dict[str, Any] = {"q_last": q_last, "k_first": keys}
    if window is not None:
        placed |= {"q_floor": q_last - window, "k_last": keys}
    behind = None if window is None else window - 1
    beside = torch.rand(1, 4, rows, -(-300 // block), device=device)
    more: dict[str, Any] = of | {"first_cell": first, "beside": beside, "factor": 0.5}
    ordered = arguments(q[:, :, sampled], k, 1, **more, every=every, behind=behind)
    got = assert_right(ordered)
    torch.testing.assert_close(got, assert_right(arguments(q[:, :, sampled], k, 1, **more, **placed)))
    alone = assert_right(arguments(q[:, :, sampled], k, 1, **of, first_cell=first, every=every, behind=behind))
    assert bool((got >= beside).all())
    torch.testing.assert_close(got[:, :, : alone.shape[2]], beside[:, :, : alone.shape[2]].maximum(0.5 * alone))
    queries, keys = ordered.pop("q"), ordered.pop("k")
    torch.testing.assert_close(strided_mass(queries, keys, **ordered), got, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("windowed", [False, True])
def test_orders_of_cells_of_one_slot(
    windowed: bool, heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided_mass_triton, "_PROGRAMS", 8)  # so that a program meets several tiles
    q, k, _ = make_qkv(N=160, Hq=4, Hkv=2, D=16, device=device)
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(160).float() + 24 * torch.rand(1, heads, 160, generator=generator)
    first = order.argsort(-1).int().to(device)  # neighbours trade places: tiles are whole, partly and not reached
    last = torch.arange(160, dtype=torch.int32, device=device).view(1, 1, -1)
    first[..., 0] = 0
    window: dict[str, Any] = {"q_floor": last - 48, "k_last": first} if windowed else {}
    assert_right(arguments(8 * q, k, 1, flipped=False, q_last=last, k_first=first, **window))


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 1), (8, 2), (7, 1)])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_orders(Hq: int, Hkv: int, heads: int, device: str) -> None:
    """Positions of any order, for all heads, each KV head or each query head; whole tiles are out of reach."""
    heads = {1: 1, 2: Hkv, 8: Hq}[heads]
    q, k, _ = make_qkv(N=128, Hq=Hq, Hkv=Hkv, D=16, device=device)
    generator = torch.Generator().manual_seed(0)
    first = (torch.rand(1, heads, 32, generator=generator) * 128).int().to(device)
    first[..., 0] = 0  # every query reaches a cell
    last = torch.arange(3, 128, 4, dtype=torch.int32, device=device).view(1, 1, -1)
    assert_right(arguments(8 * q, k, q_last=last, k_first=first))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_head_dims(D: int, device: str) -> None:
    q, k, _ = make_qkv(N=70, Hq=2, Hkv=1, D=D, dtype=torch.float16, device=device)
    assert_right(arguments(4 * q, k, 8, high=2, wide=2), tiles=None)


def exact_qkv(**sizes: Any) -> tuple[Tensor, Tensor]:
    """Queries and keys in steps of 1/8: fp32 adds their products exactly, in whichever order a library does that."""
    q, k, _ = make_qkv(**sizes)
    return (8 * q).round() / 8, (8 * k).round() / 8


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("workspace", [1, 2**13])
def test_bands_and_spans_do_not_change_mass(
    workspace: int, slots: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = exact_qkv(N=200, M=150, Hq=2, Hkv=1, D=16, device=device)
    given, tiles = arguments(8 * q, k, slots), SMALL if slots > 1 else SMALL_POOLED
    whole = strided_mass_triton.strided_mass_triton(**given, tiles=tiles)
    monkeypatch.setattr(strided_mass_triton, "_WORKSPACE", workspace)
    monkeypatch.setattr(strided_mass_triton, "_PROGRAMS", 4)
    in_bands = strided_mass_triton.strided_mass_triton(**given, tiles=tiles)
    assert torch.equal(in_bands, whole)


@pytest.mark.slow
@pytest.mark.parametrize("high", [8, 64])
def test_mass_does_not_depend_on_what_comes_later(high: int, device: str) -> None:
    """Cells have the same bits in a short prompt as in a long one, of more tiles than are added up at once."""
    tiles = 70 if high == 8 else 36  # of 64 and of 16 at once
    q, k = exact_qkv(N=tiles * 32, Hq=1, Hkv=1, D=16, device=device)
    whole = strided_mass_triton.strided_mass_triton(**arguments(4 * q, k, 1, high=high), tiles=SMALL_POOLED)
    for end, M in ((34 * 32, 64), (4 * 32, 128)):
        given = arguments(4 * q[:, :, end - M : end], k[:, :, :end], 1, high=high)
        got = strided_mass_triton.strided_mass_triton(**given, tiles=SMALL_POOLED)
        want = whole[:, :, (end - M) // high : end // high, : end // 4]
        assert torch.equal(got, want)


def test_large_logits(device: str) -> None:
    """A cell that beats another by hundreds takes all the mass; nothing overflows."""
    q, k, _ = make_qkv(N=96, Hq=1, Hkv=1, D=16, device=device)
    assert_right(arguments(300 * q, k))


@pytest.mark.slow
def test_of_a_gpu_s_tiles(device: str) -> None:
    """Tiles of the size that a GPU takes, whole ones and short ones."""
    for N, M, segment in ((1000, 1000, None), (1024, 1024, 64), (1000, 615, None)):
        q, k, _ = make_qkv(N=N, M=M, Hq=2, Hkv=1, D=64, dtype=torch.float16, device=device)
        assert_right(
            arguments(4 * q, k, 4, high=8, wide=8, segment=segment), tiles=ProductTiles(128, 128, 64, 8, 3)
        )


@pytest.mark.parametrize("M", [64, 50])
def test_a_scorer_takes_it(M: int, device: str) -> None:
    q, k, _ = make_qkv(N=64, M=M, Hq=2, Hkv=1, D=16, device=device)
    scorer = bs.AntidiagonalScorer(4, block=16)
    got = scorer(q, k, bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25)).values
    want = scorer(q.cpu(), k.cpu(), bs.GlobalPermutation(), bs.AttentionSpec(scale=0.25)).values
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-6)

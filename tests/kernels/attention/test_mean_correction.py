"""The kernels of the mean correction against the reference in float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.testing import assert_within_budget, make_qkv
from tests import stages
from tests.machine import GPU

pytest.importorskip("triton")
from blocksparse.kernels.attention.mean_correction import add_mean_correction
from blocksparse.kernels.common.tiles import TritonTiles
from blocksparse.kernels.masks.arguments import KeptBlocks

SMALL = TritonTiles(16, 16, 4, 2)


def given(
    pipeline: bs.Pipeline[Any, Any, bs.BlockMask], q: Tensor, k: Tensor, v: Tensor, **asked: Any
) -> dict[str, Any]:
    """Arguments of the op, for what a pipeline with an exact executor gives."""
    trace = pipeline.trace(q, k, v, **asked)
    grid, order, spec = trace.mask.grid, trace.permutation, trace.spec
    kept = KeptBlocks(trace.mask.keep, grid, order.q_index, order.key_slots)
    return {
        "q": q, "k": k, "v": v, "out": trace.output.out, "lse": trace.output.lse, "kept": kept,
        "scale": spec.scale, "softcap": spec.softcap,
    }  # fmt: skip


def assert_right(arguments: dict[str, Any], tiles: TritonTiles = SMALL) -> tuple[Tensor, Tensor]:
    out, lse = add_mean_correction.kernel()(**arguments, tiles=tiles)
    plain, _ = add_mean_correction(**arguments)
    wide = {name: x.double() if name in ("q", "k", "v", "out", "lse") else x for name, x in arguments.items()}
    want, want_lse = add_mean_correction(**wide)
    assert_within_budget(out, want, plain)
    torch.testing.assert_close(
        lse.double(), want_lse, rtol=1e-3, atol=2e-3 if out.dtype != torch.float32 else 1e-5
    )
    assert not torch.equal(out, arguments["out"])
    return out, lse


def pipeline(block: int = 16, keep: float = 0.3, order: Any = None) -> bs.Pipeline[Any, Any, Any]:
    return bs.Pipeline(order or bs.Identity(), stages.AnyOrder(block), bs.TopK(share=keep), bs.ReferenceExecutor())


@pytest.mark.parametrize(("block", "tile"), [(16, 16), pytest.param(32, 16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call", [{}, {"causal": False}, {"window": 70}, {"softcap": 2.0}, {"sinks": 0.5}], ids=str
)
@pytest.mark.parametrize("M", [75, pytest.param(200, marks=pytest.mark.slow)])
def test_calls(block: int, tile: int, call: dict[str, Any], M: int, device: str) -> None:
    q, k, v = make_qkv(B=2, N=200, M=M, Hq=2, Hkv=1, D=16, dtype=torch.float32, device=device)
    assert_right(given(pipeline(block), q, k, v, **call), TritonTiles(tile, 16, 4, 2))


@pytest.mark.parametrize(
    ("order", "call"),
    [
        (bs.SegmentKeySort(64, last_q=16), {}),
        (stages.Shuffle(), {"causal": False}),
        (bs.HilbertOrder((3, 5, 10)), {"causal": False}),
    ],
    ids=str,
)
def test_orders(order: Any, call: dict[str, Any], device: str) -> None:
    q, k, v = make_qkv(N=150, Hq=4, Hkv=2, D=16, dtype=torch.float32, device=device)
    assert_right(given(pipeline(order=order), q, k, v, **call))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *([torch.bfloat16] if GPU else [])], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(80, 24), (64, 64), (128, 128)])
def test_head_dims_and_dtypes(dtype: torch.dtype, D: int, Dv: int, device: str) -> None:
    q, k, v = make_qkv(N=130, Hq=2, Hkv=2, D=D, Dv=Dv, dtype=dtype, device=device)
    # The axis of heads lies behind that of tokens.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert_right(given(pipeline(), q, k, v))


def test_more_columns_than_a_word_has_bits(device: str) -> None:
    q, k, v = make_qkv(N=1100, M=40, Hq=2, Hkv=1, D=16, dtype=torch.float32, device=device)
    assert_right(given(pipeline(), q, k, v, causal=False), TritonTiles(16, 64, 4, 2))
    assert_right(given(pipeline(), q, k, v), TritonTiles(16, 32, 4, 2))
    if GPU:
        q, k, v = make_qkv(N=20000, M=40, Hq=2, Hkv=1, D=16, dtype=torch.float32, device=device)
        assert_right(given(pipeline(), q, k, v))


def test_one_mask_for_each_kv_head(device: str) -> None:
    q, k, v = make_qkv(N=100, Hq=4, Hkv=2, D=16, dtype=torch.float32, device=device)
    shared = bs.Pipeline(
        bs.SegmentKeySort(32, last_q=8), stages.AnyOrder(16), bs.SharedByGroup(bs.TopK(2)), bs.ReferenceExecutor()
    )
    arguments = given(shared, q, k, v)
    assert arguments["kept"].keep.shape[1] == 2
    assert_right(arguments)


@pytest.mark.parametrize("bad", [float("nan"), 1e30, pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_not_finite_stays_with_those_who_see_it(bad: float, which: str, device: str) -> None:
    """A query has the bits that it has without it, unless it takes it; then its output is not finite either."""
    q, k, v = make_qkv(N=200, Hq=2, Hkv=1, D=16, dtype=torch.float32, device=device)
    arguments = given(pipeline(), q, k, v)
    before = add_mean_correction.kernel()(**arguments, tiles=SMALL)
    changed = arguments[which].clone()
    changed[:, :, 64:80] = bad
    after = add_mean_correction.kernel()(**{**arguments, which: changed}, tiles=SMALL)
    keep, rows = arguments["kept"].keep.expand(1, 2, -1, -1), torch.arange(200, device=device) // 16
    takes = (~keep[..., 4] & (torch.arange(keep.shape[2], device=device) > 4))[:, :, rows]
    assert bool(takes.any())
    assert not bool(takes.all())
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[~takes], y[~takes])
        if bad != 1e30:
            assert not bool(y[takes].isfinite().any())


def test_nothing_dropped_changes_no_bit(device: str) -> None:
    q, k, v = make_qkv(N=100, Hq=2, Hkv=1, D=16, dtype=torch.float16, device=device)
    arguments = given(pipeline(keep=1.0), q, k, v)
    for out, lse in (add_mean_correction.kernel()(**arguments, tiles=SMALL), add_mean_correction(**arguments)):
        assert torch.equal(out, arguments["out"])
        assert torch.equal(lse, arguments["lse"].float())

"""What kernels share: who takes a call, where outputs lie, the softcap, and heads that are left out."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
import blocksparse.kernels
from blocksparse.kernels.common.dispatch import Dispatched, compiled, on_gpus
from blocksparse.kernels.common.sizes import HeadMask, copies_in_bulk, empty_as, empty_together, for_bulk_copies
from blocksparse.kernels.score.block_softmax import block_softmax
from blocksparse.kernels.select.vertical_slash import ChosenRuns, running_count
from tests.kernels.block_grids import heads_of, make_grid
from tests.layouts import LAYOUTS

pytest.importorskip("triton")
import triton
import triton.language as tl

from blocksparse.kernels.common.device_functions import capped
from blocksparse.kernels.gemm.products_triton import block_products_triton
from blocksparse.kernels.score.block_mean_triton import block_mean_triton
from blocksparse.kernels.score.block_softmax_triton import block_softmax_triton
from blocksparse.kernels.select.vertical_slash_triton import vertical_slash_blocks_triton
from blocksparse.launch.launches import remembered

_ROOT = Path(blocksparse.kernels.__path__[0])
_MODULES = [
    f"blocksparse.kernels.{path.parent.name}.{path.stem}"
    for path in sorted(_ROOT.glob("*/*.py"))
    if "@on_gpus" in path.read_text() and path.stem != "dispatch"
]
_OPERATIONS = {
    f"{module}.{name}": value
    for module in _MODULES
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, Dispatched) and value.__module__ == module
}


def _parameters(function: Any) -> list[tuple[str, object, object]]:
    return [(name, x.kind, x.default) for name, x in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("name", _OPERATIONS)
def test_a_kernel_has_the_signature_of_its_operation(name: str) -> None:
    operation: Any = _OPERATIONS[name]
    while isinstance(operation, Dispatched):
        kernel, mine = _parameters(operation.kernel()), _parameters(operation.reference)
        assert kernel[: len(mine)] == mine
        assert all(default is not inspect.Parameter.empty for _, _, default in kernel[len(mine) :])
        operation = operation.otherwise


def _by_kernel(x: Tensor, n: int = 1) -> str:
    return f"compiled {n}"


@on_gpus(torch.float32, where=lambda x, n=1: n < 3)
@compiled(_by_kernel, lambda x, n=1: x.dtype == torch.float16)
def operation(x: Tensor, n: int = 1) -> str:
    """What it does."""
    return f"plain {n}"


def test_who_takes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    assert operation.__doc__ == "What it does."
    said = operation(x), operation(x.half()), operation.reference(x.half(), n=2)
    assert said == ("plain 1", "compiled 1", "plain 2")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(operation, "kernel", lambda: lambda x, n=1: f"triton {n}")
    assert [operation(x), operation(x, 3), operation(x.double()), operation(x.half(), n=2)] == [
        "triton 1", "plain 3", "plain 1", "compiled 2",
    ]  # fmt: skip


LIKE_Q = {"tokens before heads": (0, 2, 1, 3), "tokens before batch": (2, 0, 1, 3)}


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_lie_as_queries_do(layout: str, width: int) -> None:
    """In the order of the axes of q, densely; contiguous where rows of q are not, or where heads share memory."""
    q = LAYOUTS[layout](torch.zeros(2, 3, 5, 8))
    out = empty_as(q, width, torch.float16)
    assert out.shape == (2, 3, 5, width)
    assert out.dtype == torch.float16
    assert out.permute(LIKE_Q.get(layout, (0, 1, 2, 3))).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
def test_tensors_of_one_allocation(dtype: torch.dtype) -> None:
    """Each is contiguous and aligned, and none lies in another's memory."""
    shapes = (2, 3), (1, 1, 5), (), (4, 0), (7,)
    made = empty_together(dtype, torch.device("cpu"), *shapes)
    assert [tuple(x.shape) for x in made] == [*shapes]
    for x in made:
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
    for i, x in enumerate(made):
        x.fill_(i % 2)
    for i, x in enumerate(made):
        assert bool((x == i % 2).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_descriptors_read(layout: str) -> None:
    """Copied only where rows are not aligned or not dense, or where entries share memory."""
    x = LAYOUTS[layout](torch.randn(2, 3, 5, 8, dtype=torch.float16))
    unfit = "expanded" in layout or layout in (
        "head dim not innermost", "channels last", "odd rows", "offset by one element",
    )  # fmt: skip
    assert copies_in_bulk(x) is not unfit
    copy = for_bulk_copies(x)
    assert copies_in_bulk(copy)
    assert torch.equal(copy, x)
    assert (copy is x) is not unfit


def test_axes_of_one_entry() -> None:
    """Their strides mean nothing to torch, and much to a descriptor."""
    x = torch.zeros(64, dtype=torch.float16).as_strided((1, 1, 4, 16), (1, 3, 16, 1))
    assert x.is_contiguous()
    assert not copies_in_bulk(x)
    assert for_bulk_copies(x).stride() == (64, 64, 16, 1)


BLOCK = 1024


@remembered
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x_ptr, out_ptr, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, capped(tl.load(x_ptr + at), cap))


def softcap(x: Tensor, cap: float) -> Tensor:
    out = torch.empty_like(x)
    _kernel[(len(x) // BLOCK,)](x, out, cap, BLOCK=BLOCK)
    return out


def test_it_errs_by_a_few_units_of_the_last_place(device: str) -> None:
    """Near 0, where a difference would cancel, between its two formulas, and where it is 1."""
    magnitudes = torch.cat((torch.linspace(-20, 0.9, 6 * BLOCK).exp(), torch.linspace(0.5, 20, 2 * BLOCK)))
    x = torch.cat((magnitudes, -magnitudes)).to(device)
    want = 30 * torch.tanh(x.double())
    error = ((softcap(x, 30.0).double() - want) / want).abs()
    assert float(error.max()) < 4 * 2**-23


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, in the interpreter
def test_what_is_not_finite(device: str) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], device=device).repeat(BLOCK // 4)
    out = softcap(x, 5.0)
    assert out[:2].tolist() == [5.0, -5.0]
    assert out[2].isnan()
    assert out[3] == 0


def some(grid: bs.Grid, device: str, *, others: bool, per_head: bool = True) -> HeadMask:
    """Of three heads the second, which has a NaN, is not below; in the last batch entry none is."""
    B, Hq, *_ = heads_of(grid)
    number = torch.tensor([0.1, float("nan"), 0.3], device=device).repeat(B, 1)[:, :Hq]
    number[-1] += 5.0 * (B > 1)
    bound = torch.tensor([0.2, 1.0, 0.5] if per_head else [0.4], dtype=torch.float64, device=device)
    return HeadMask(number, bound.view(1, -1, 1, 1), others)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_asked_for_is_the_same(others: bool, per_head: bool, device: str) -> None:
    grid = make_grid("chunk", device)
    B, Hq, rows, cols = heads_of(grid)
    heads = some(grid, device, others=others, per_head=per_head)
    these = heads.these()
    assert these.flatten().tolist() == [
        (x != others) for b in range(B) for x in ((True, False, True) if b < B - 1 or B == 1 else (False,) * 3)
    ]
    assert torch.equal(heads.rest().these(), ~these)

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, Hq, grid.q_len, 24, generator=generator).to(device)
    k = torch.randn(B, 1, cols, 24, generator=generator).to(device)
    calls = []
    if not others:  # who scores asks for heads below a bound
        means = block_mean_triton(q, grid.q_block, grid.q_lead, False, None)
        calls += [
            (means, block_mean_triton(q, grid.q_block, grid.q_lead, False, None, heads)),
            (block_products_triton(means, k, grid), block_products_triton(means, k, grid, heads=heads)),
        ]
    counts = [
        running_count((torch.rand(B, Hq, n, generator=generator) < 0.2).to(device))
        for n in (cols, max(grid.q_len, grid.k_len))
    ]
    lines = ChosenRuns(counts[0], 1), ChosenRuns(counts[1], 1)
    also = (torch.rand(B, Hq, rows, cols, generator=generator) < 0.2).to(device)
    for first, kept in ((None, None), (1, also)):
        want, got = (
            vertical_slash_blocks_triton(*lines, grid, first=first, also=kept, heads=asked)
            for asked in (None, heads)
        )
        calls.append((want, got))
    for want, got in calls:
        assert torch.equal(*(torch.where(these & _known(x, grid), x, 0) for x in (want, got)))


def _known(x: Tensor, grid: bs.Grid) -> Tensor:
    """Blocks that a query sees; other products have no meaning."""
    return grid.visible if x.shape[2:] == (grid.rows, grid.cols) else x == x


@pytest.mark.parametrize("long", [False, True])
def test_mass_of_other_heads_is_0(long: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid("wide", device)
    if long:  # a row is read in pieces
        monkeypatch.setattr("blocksparse.kernels.score.block_softmax_triton._LEAST", 16)
        monkeypatch.setattr("blocksparse.kernels.score.block_softmax_triton._MOST", 16)
    logits = torch.randn(heads_of(grid), generator=torch.Generator().manual_seed(0)).to(device)
    heads = some(grid, device, others=False)
    want = block_softmax_triton(logits.clone(), grid)[0].masked_fill(~heads.these(), 0.0)
    assert torch.equal(block_softmax_triton(logits.clone(), grid, heads=heads)[0], want)
    torch.testing.assert_close(block_softmax(logits.clone(), grid, heads=heads)[0], want)

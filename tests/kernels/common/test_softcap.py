"""The softcap of kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from blocksparse.kernels.common.device_functions import capped
from blocksparse.launch.launches import remembered

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

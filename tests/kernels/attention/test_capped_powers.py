"""Powers of capped logits in Hopper's attention kernel: one tile of scores against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.machine import HOPPER

if not HOPPER:
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.hopper.softmax import capped_powers

ROWS, KEYS = 64, 128


@gluon.jit
def _kernel(x_ptr, out_ptr, scale):  # type: ignore[no-untyped-def]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    at = row[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, SCORES))[None, :]
    gl.store(out_ptr + at, capped_powers(gl.load(x_ptr + at), scale))


def powers(x: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(x)
    _kernel[(1,)](x, out, scale, num_warps=4)
    return out


@pytest.mark.parametrize("softcap", [50.0, 30.0, 2.0, 1e-30])
def test_they_err_by_2_to_the_minus_13(softcap: float) -> None:
    """From one end of the range to the other, and near 0."""
    torch.manual_seed(0)
    x = 2 * torch.rand(ROWS, KEYS, device="cuda") - 1
    x[:3], x[3] = torch.tensor([[-1.0], [1.0], [0.0]], device="cuda"), 1e-6 * x[3]
    scale = torch.tensor(softcap * math.log2(math.e), dtype=torch.float32)
    want = torch.exp2(x.double() * scale.item())
    assert float((powers(x, scale.item()).double() / want - 1).abs().max()) < 2**-13


def test_each_depends_on_its_own_score_and_key_alone() -> None:
    torch.manual_seed(0)
    x, order = 2 * torch.rand(ROWS, KEYS, device="cuda") - 1, torch.randperm(ROWS, device="cuda")
    assert torch.equal(powers(x[order], 72.0), powers(x, 72.0)[order])
    later = torch.roll(x, KEYS // 4, 1)  # a block of 32 keys further on, as where a list of blocks has one more
    assert torch.equal(powers(later, 72.0), torch.roll(powers(x, 72.0), KEYS // 4, 1))


def test_hidden_keys_and_what_is_no_number() -> None:
    x = torch.zeros(ROWS, KEYS, device="cuda")
    x[0], x[1] = -float("inf"), float("nan")
    out = powers(x, 72.0)
    assert out[0].eq(0).all()
    assert not out[1].isfinite().any()
    assert (out[2:] - 1).abs().lt(2**-13).all()

"""The Triton kernel of `block_divergence`: a program takes one head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.launch.launches import remembered


def block_divergence_triton(logits: Tensor, true: Tensor, scale: float = 1.0) -> Tensor:
    """Launch the kernel; arguments as of `block_divergence`."""
    (B, H, cols), logits, true = logits.shape, logits.contiguous(), true.contiguous()
    out = torch.empty((B, H), dtype=torch.float32, device=logits.device)
    wide = max(power_of_2(cols), 16)
    _kernel[(B * H,)](logits, true, out, scale, cols, COLS=wide, num_warps=8 if wide > 2048 else 4)
    return out


@triton.jit
def _apart(x, mean):
    """`x ln(x / mean)`, and 0 for an `x` of 0; NaN stays NaN."""
    some = mean > 0.0  # half of the least number is 0
    return tl.where(x == 0.0, 0.0, x * tl.log(tl.where(x > 0.0, x, 1.0)) - x * tl.log(tl.where(some, mean, 1.0)))


@remembered
@triton.jit(do_not_specialize=["scale", "cols"])
def _kernel(logits_ptr, true_ptr, out_ptr, scale, cols, COLS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    logits = tl.load(logits_ptr + head * cols + col, mask=col < cols, other=0.0) * scale
    logits = tl.where(col < cols, logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, 0))
    pooled = weight / tl.sum(weight, 0)
    true = tl.load(true_ptr + head * cols + col, mask=col < cols, other=0.0)
    mean = (pooled + true) / 2
    total = tl.sum(_apart(pooled, mean) + _apart(true, mean), 0) / 2
    tl.store(out_ptr + head, tl.sqrt_rn(tl.where(total < 0.0, 0.0, total)))

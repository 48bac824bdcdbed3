"""The Triton kernel of `run_sums`: a program takes some runs of one head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.launch.launches import remembered

_ENTRIES = 2048  # per program


def run_sums_triton(x: Tensor, run: int) -> Tensor:
    """Launch the kernel; arguments as of `run_sums`."""
    (B, H, n), x, wide = x.shape, x.contiguous(), power_of_2(run)
    out = torch.empty((B, H, cdiv(n, run)), dtype=torch.float32, device=x.device)
    runs = max(_ENTRIES // wide, 1)
    _kernel[(cdiv(out.shape[2], runs), B * H)](x, out, n, run, out.shape[2], RUNS=runs, WIDE=wide, num_warps=4)
    return out


@remembered
@triton.jit(do_not_specialize=["n", "runs"])
def _kernel(x_ptr, out_ptr, n, run, runs, RUNS: tl.constexpr, WIDE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * RUNS + tl.arange(0, RUNS)[:, None]
    each = tl.arange(0, WIDE)[None, :]
    entry = at * run + each
    x = tl.load(x_ptr + head * n + entry, mask=(each < run) & (entry < n), other=0.0)
    tl.store(out_ptr + head * runs + at, tl.sum(x, 1, keep_dims=True), mask=at < runs)

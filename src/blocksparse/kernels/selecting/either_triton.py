"""The Triton kernel that joins two masks: PyTorch's own operation is none that a call can repeat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.runtime.device import device_of
from blocksparse.runtime.launches import remembered

_TILE = 8192  # entries per program


def either_triton(mine: Tensor, its: Tensor) -> Tensor:
    """Entries that are true in either of two masks of one shape, bool, each without gaps in memory."""
    out = torch.empty(mine.shape, dtype=torch.bool, device=mine.device)
    n = mine.numel()
    with device_of(mine):
        _kernel[(cdiv(n, _TILE),)](mine, its, out, n, TILE=_TILE, num_warps=4)
    return out


@remembered
@triton.jit
def _kernel(mine_ptr, its_ptr, out_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    mine = tl.load(mine_ptr + at, mask=there, other=0) != 0
    its = tl.load(its_ptr + at, mask=there, other=0) != 0
    tl.store(out_ptr + at, mine | its, mask=there)

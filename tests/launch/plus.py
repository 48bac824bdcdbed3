"""A kernel of this library's kind: `x + by`, for tests of what is done with launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.launch.launches import remembered


@remembered
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x_ptr, out_ptr, strides, size, by, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * strides[0] + tl.arange(0, COLS)[None, :] * strides[1]
    entry = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    there = (tl.arange(0, ROWS)[:, None] < size[0]) & (tl.arange(0, COLS)[None, :] < size[1])
    tl.store(out_ptr + entry, tl.load(x_ptr + at, mask=there, other=0.0) + by, mask=there)


def plus(x: Tensor, by: float) -> Tensor:
    """`x + by` of `[8|less, 8|less]` fp32, in new memory."""
    out = torch.empty(8, 8, dtype=torch.float32, device=x.device)
    into(out, x, by)
    return out[: x.shape[0], : x.shape[1]]


def into(out: Tensor, x: Tensor, by: float) -> None:
    """Write `x + by` to the front of `out`, which has rows of 8."""
    launch: Any = _kernel[(1,)]
    launch(x, out, x.stride(), tuple(x.shape), float(by), ROWS=8, COLS=8, num_warps=1)

"""Rows of queries, keys and values, as kernels load them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(ptr, strides, b, h, at, there, D: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows `at` of head `(b, h)` of a tensor `[B, H, N, D]`, `[len(at), BLOCK_D]`; columns past `D` are zeros.

    So are rows that are not `there`, unless `WHOLE` says that all are. `h` may be a head for each row.
    """
    dims = tl.arange(0, BLOCK_D)
    source = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + at.to(tl.int64) * strides[2]
    source = source[:, None] + dims[None, :]
    if WHOLE and BLOCK_D == D:
        rows = tl.load(source)
    elif WHOLE:
        rows = tl.load(source, mask=(dims < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        rows = tl.load(source, mask=there[:, None], other=0.0)
    else:
        rows = tl.load(source, mask=there[:, None] & (dims < D)[None, :], other=0.0)
    return rows

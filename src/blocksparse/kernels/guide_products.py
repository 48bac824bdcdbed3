"""The product of every query with one vector per KV head (S2O, eq. 1).

    out[b, h, i] = q[b, h, i] . guide[b, h // G]

in fp32 or better. On GPUs one launch that reads every query once; otherwise, and for float64, the plain torch below.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUERIES_AT_ONCE = 1 << 12


def guide_products(q: Tensor, guide: Tensor) -> Tensor:
    """`[B, Hq, M]` for `q` `[B, Hq, M, D]` and `guide` `[B, Hkv, D]` in fp32 or better."""
    if q.is_cuda and q.dtype in _DTYPES:
        from blocksparse.kernels.guide_products_triton import guide_products_triton

        return guide_products_triton(q, guide)
    return guide_products_reference(q, guide)


def guide_products_reference(q: Tensor, guide: Tensor) -> Tensor:
    """The same in plain torch, some queries at a time."""
    guide = guide.unsqueeze(-1)  # [B, Hkv, D, 1]
    parts = [
        rearrange(torch.matmul(rows.to(guide.dtype), guide), "B H (R M) 1 -> B (H R) M", M=part.shape[2])
        for part in q.split(_QUERIES_AT_ONCE, dim=2)
        for rows in [rearrange(part, "B (H R) M D -> B H (R M) D", H=guide.shape[1])]
    ]
    return torch.cat(parts, dim=-1)

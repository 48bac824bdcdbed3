"""The Triton kernel of `guide_products`: fp16, bf16 and fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.hardware import device_of
from blocksparse.kernels.sizes import cdiv, power_of_2

TILE = 8192  # entries per program


def guide_products_triton(q: Tensor, guide: Tensor) -> Tensor:
    """Launch the kernel; arguments as of `guide_products`."""
    B, H, M, D = q.shape
    q, guide = q if q.stride(-1) == 1 else q.contiguous(), guide.float().contiguous()
    out = torch.empty((B, H, M), dtype=torch.float32, device=q.device)
    block_d = power_of_2(D)
    rows = max(1, TILE // block_d)
    with device_of(q):
        _kernel[(cdiv(M, rows), H, B)](
            q, guide, out, q.stride()[:3], M, H // guide.shape[1],
            D=D, BLOCK_D=block_d, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _kernel(
    q_ptr, guide_ptr, out_ptr, q_strides, M, heads_per_guide,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(2), tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)[None, :]
    source = q_ptr + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    source = source + row.to(tl.int64)[:, None] * q_strides[2] + dims
    if BLOCK_D == D:
        inside = (row < M)[:, None]
    else:
        inside = (row < M)[:, None] & (dims < D)
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    guide_at = guide_ptr + (b * (tl.num_programs(1) // heads_per_guide) + h // heads_per_guide) * D
    guide = tl.load(guide_at + dims, mask=dims < D, other=0.0)
    out_at = out_ptr + (b.to(tl.int64) * tl.num_programs(1) + h) * M + row
    tl.store(out_at, tl.sum(q * guide, 1), mask=row < M)

"""Dense attention with its lse by PyTorch's flash kernel for CPUs.

    out[n, i] = sum_j softmax_j(scale * q[n, i] . k[n, j]) v[n, j]

over all keys `j`, or when causal over those up to `i`. The kernel holds a few logits at a time and needs no compiler. As
with `products`, the result depends on the inputs alone: neither on autocast nor on what the process lets torch round fp32
products to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.multiplying.products import rounds_fp32
from blocksparse.precision import without_autocast


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """`out` `[n, M, D]` of the dtype of q, and lse `[n, M]`.

    Args:
        q: `[n, M, D]` on a CPU, in fp32 or float64.
        k: `[n, N, D]`, at least one key, and M keys when causal.
        v: `[n, N, D]`; the kernel takes one head dim for all three.
    """
    if q.dtype == torch.float32 and rounds_fp32():
        out, lse = flash_on_cpu(q.double(), k.double(), v.double(), scale, causal=causal)
        return out.float(), lse.float()
    with without_autocast(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=causal, scale=scale
        )
    return out.squeeze(1), lse.squeeze(1)

"""Dense attention with its lse by PyTorch's flash kernel for CPUs.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h, j]) v[b, h, j]

over all keys `j`, or when causal over those up to `i`. The kernel holds a few logits at a time and needs no compiler. As
with `products`, the result depends on the inputs and the CPU alone: neither on autocast nor on what the process lets
torch round fp32 products to.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.multiplying.products import rounds_fp32, wide_dtype
from blocksparse.launch.torch_modes import without_autocast

LARGE_LSE = 1024.0
"""The lse up to which fp32 holds it to 3e-5. Beyond, parts of a row are merged in float64."""


def flash_dtype(x: Tensor) -> torch.dtype:
    """What to give `flash_on_cpu` for `x`: bf16 as it is where the CPU has matrix units for it, else fp32 or better.

    With these units (Intel's AMX) the kernel takes half as long in bf16 as in fp32; elsewhere up to a hundred times
    as long. It sums in fp32.
    """
    return x.dtype if x.dtype == torch.bfloat16 and _has_matrix_units() else wide_dtype(x)


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """`out` `[B, H, M, Dv]` of the dtype of q, and lse `[B, H, M]`.

    Args:
        q: `[B, H, M, D]` on a CPU, in fp32, float64 or bf16, as k and v.
        k: `[B, H, N, D]`, at least one key, and M keys when causal.
        v: `[B, H, N, Dv]`.
    """
    if q.dtype == torch.float32 and rounds_fp32():
        out, lse = flash_on_cpu(q.double(), k.double(), v.double(), scale, causal=causal)
        return out.float(), lse.float()
    if scale <= 0:  # PyTorch's kernel would make NaN of it where keys are masked
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    Dv, missing = v.shape[-1], v.shape[-1] - q.shape[-1]  # the kernel takes one head dim for all three
    if missing > 0:
        q, k = pad(q, (0, missing)), pad(k, (0, missing))
    elif missing:
        v = pad(v, (0, -missing))
    with without_autocast(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, scale=scale
        )
    return out[..., :Dv], lse


@functools.cache
def _has_matrix_units() -> bool:
    # ATEN_CPU_CAPABILITY may tell PyTorch to do without AVX-512; its kernel then has no use for these units.
    there: bool = torch.cpu.get_capabilities().get("amx_tile", False)
    return there and torch.backends.cpu.get_cpu_capability().startswith("AVX512")

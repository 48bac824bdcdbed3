"""Products of matrices: this is the only place where plain torch multiplies them.

    products[b, h, i, j] = q[b, h, i] . k[b, h // (Hq / H), j]

The result depends on the inputs alone: neither on autocast nor on what the process lets torch round fp32 to (TF32 on
GPUs, bf16 and TF32 on CPUs). cuBLAS obeys such settings, so on GPUs fp32 takes the kernel in `block_products_triton.py`.
oneDNN obeys them on CPUs that have such products; there, while the settings are on, fp32 is multiplied in float64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from blocksparse.launch.torch_modes import without_autocast


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are taken in: fp32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every row of `q` `[B, Hq, rows, E]` with every row of `k` `[B, H, cols, E]`: `[B, Hq, rows, cols]`.

    `H` divides `Hq`; keys are not repeated. Rows of weights times values are `products(weights, values.mT)`. They
    are in fp32 or better, since half precision would round long sums, and fp16 may not hold them. A GPU's tensor
    cores take half precision as it is; elsewhere it is converted first.
    """
    dtype = wide_dtype(q)
    if q.dtype != dtype and (not q.is_cuda or torch.version.hip is not None):
        q, k = q.to(dtype), k.to(dtype)
    if q.dtype == torch.float32:
        if q.is_cuda:
            from blocksparse.kernels.multiplying.block_products_triton import products_triton

            return products_triton(q, k)
        if rounds_fp32():
            return products(q.double(), k.double()).float()
    rows = q.shape[2]
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3).flatten(0, 1)  # [B H, G rows, E]
    keys = k.flatten(0, 1).transpose(-1, -2)
    with without_autocast(q):
        sums = torch.bmm(queries, keys) if q.dtype == dtype else torch.bmm(queries, keys, dtype)
    return sums.view(q.shape[0], q.shape[1], rows, -1)


def rounds_fp32() -> bool:
    """Whether a CPU would round fp32 before it multiplies, as `torch.set_float32_matmul_precision` may ask for."""
    can = _roundings()
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return bool(can) and products.fp32_precision in can


@functools.cache
def _roundings() -> frozenset[str]:
    """The formats that oneDNN can round fp32 to on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    can = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "tf32": torch.cpu.get_capabilities().get("amx_fp16", False),
    }
    return frozenset(name for name, there in can.items() if there)

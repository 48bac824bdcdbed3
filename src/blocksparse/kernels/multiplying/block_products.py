"""Pooled queries times pooled keys, for blocks in which some query may see some key.

    logits[b, h, row, col] = pooled_q[b, h, row] . pooled_k[b, h // G, col]

The kernel leaves out launch tiles in which causality allows no block, so entries there hold anything. Each of its products
is made of three tf32 products on the tensor cores, and as exact as one in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.multiplying.products import products
from blocksparse.kernels.positions.block_grid import BlockGrid


@on_gpus(torch.float32)
def block_products(pooled_q: Tensor, pooled_k: Tensor, grid: BlockGrid, *, heads: Below | None = None) -> Tensor:
    """Logits `[B, Hq, rows, cols]` of `pooled_q` `[B, Hq, rows, D]` and `pooled_k` `[B, H, cols, D]`.

    `H` divides `Hq`. Entries of blocks that are not reachable have no meaning, and may be NaN; nor have those of heads
    that are not among `heads`.
    """
    return products(pooled_q, pooled_k)

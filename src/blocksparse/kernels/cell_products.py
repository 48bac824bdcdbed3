"""What kernels over cells share: consecutive tokens as one vector, and the products of such vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are taken in: fp32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def cells(x: Tensor, slots: int, lead: int, filler: Tensor | None = None) -> Tensor:
    """Tokens `[B, H, N, D]` in cells, `[B, H, cells, slots, D]`; `lead` empty slots come first.

    Args:
        filler: `[B, H, 2, D]`, what the empty slots hold at the start and at the end; zeros unless given.
    """
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return x.unflatten(2, (-1, slots))
    if filler is None:
        return pad(x, (0, 0, lead, missing)).unflatten(2, (-1, slots))
    before, after = (filler[:, :, i : i + 1].expand(-1, -1, n, -1) for i, n in ((0, lead), (1, missing)))
    return torch.cat((before, x, after), dim=2).unflatten(2, (-1, slots))


def means_of_short_cells(x: Tensor, slots: int, lead: int) -> Tensor | None:
    """Mean of the tokens in the first and in the last cell, `[B, H, 2, D]`; None where no cell is short."""
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return None
    ends = (x[:, :, : slots - lead], x[:, :, -(slots - missing) :])
    return torch.stack([end.mean(2, dtype=wide_dtype(x)) for end in ends], dim=2).to(x.dtype)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every row of `q` `[B, Hq, rows, E]` with every row of `k` `[B, H, cols, E]`: `[B, Hq, rows, cols]`.

    `H` divides `Hq`; keys are not repeated. Summed in fp32 or better: half precision would round long sums, and
    fp16 may not hold them. A GPU's tensor cores take half precision as it is; elsewhere it is converted.
    """
    H, rows, wide = k.shape[1], q.shape[2], wide_dtype(q)
    if q.dtype != wide and (not q.is_cuda or torch.version.hip is not None):
        q, k = q.to(wide), k.to(wide)
    queries = q.unflatten(1, (H, -1)).flatten(2, 3).flatten(0, 1)  # [B H, G rows, E]
    keys = k.flatten(0, 1).transpose(-1, -2)
    sums = torch.bmm(queries, keys) if q.dtype == wide else torch.bmm(queries, keys, wide)
    return sums.view(q.shape[0], q.shape[1], rows, -1)

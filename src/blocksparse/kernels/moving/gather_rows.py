"""Move tokens: rows of a tensor read through an index map, or written through it.

    gather   out[b, h, i] = x[b, h // (H / Hx), index[b, h, i]]
    scatter  out[b, h, index[b, h, i]] = x[b, h, i]

On GPUs one launch does it, which reads every row and every index once; other devices take the plain torch below. Blocks
of rows that nobody wants need not be moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus
from blocksparse.launch.torch_modes import without_autocast


@on_gpus()
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` `[B, Hx, N, D]` that `index` `[B, H, M]` int32 names, `[B, H, M, D]`; `Hx` divides `H`."""
    # One head after another: `index_select` copies whole rows, and takes any strides.
    (B, H, M), group = index.shape, index.shape[1] // x.shape[1]
    rows = [x[b, h // group].index_select(0, index[b, h]) for b in range(B) for h in range(H)]
    with without_autocast(x):  # autocast refuses to join tensors of another half precision than its own
        return torch.stack(rows).view(B, H, M, x.shape[-1])


@on_gpus()
def gather_two(
    x: Tensor, y: Tensor, index: Tensor, wanted: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """`gather_rows` of `x` `[B, Hx, N, D]` and `y` `[B, Hx, N, Dy]` in one launch.

    Args:
        wanted: `[B|1, Hw, blocks]` bool, which blocks of `block` rows of the result anyone reads; `Hw` divides `H`. Rows
            of the others may hold anything, and on GPUs they are not written. None for all.
    """
    return gather_rows.plain(x, index), gather_rows.plain(y, index)


@on_gpus()
def scatter_rows(x: Tensor, index: Tensor) -> Tensor:
    """Undo a gather of as many rows: `x` `[B, H, M, ...]` and `index` `[B, H, M]` int32, each row named once."""
    place = inverse(index).long()
    return x.gather(2, place.view(*place.shape, *[1] * (x.ndim - 3)).expand(x.shape))


def inverse(index: Tensor) -> Tensor:
    """The map that undoes `index` along its last axis, int32."""
    slots = torch.arange(index.shape[-1], dtype=torch.int32, device=index.device).expand(index.shape)
    return torch.empty_like(slots, memory_format=torch.contiguous_format).scatter_(-1, index.long(), slots)

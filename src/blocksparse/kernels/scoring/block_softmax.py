"""Softmax over the blocks, or over the first keys, that a row may see.

    mass[row, col] = exp(scale * logits[row, col]) / sum of the same over the row's eligible columns

and 0 where a column is not eligible. A row without an eligible column holds no mass, nor does a logit of -inf.
The kernel reads and writes each logit once and makes no mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.twins import on_gpus
from blocksparse.kernels.positions.block_grid import BlockGrid


@on_gpus(torch.float32)
def block_softmax(
    logits: Tensor,
    grid: BlockGrid,
    *,
    scale: float = 1.0,
    segment: int | None = None,
    heads: Below | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of `logits` `[B, H, rows, cols]` over each row's reachable blocks; it may overwrite the logits.

    Args:
        scale: a positive number that logits are multiplied by.
        segment: also leave out the row's own segment, if segments have this many positions.
        heads: without a segment, those whose mass is asked for; in the others it is 0.

    Returns:
        The mass, in fp32 or better; and with `segment` the blocks of each row's own segment, `[B|1, H|1, rows, cols]`
        bool, else None.
    """
    own = None if segment is None else grid.own_segment(segment)
    eligible = grid.reachable if own is None else grid.reachable & ~own
    return _softmax(logits * scale, eligible if heads is None else eligible & heads.these()), own


@on_gpus(torch.float32)
def prefix_softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax of `logits` `[B, H, rows, keys]` over the first `seen` keys of each row; it may overwrite the logits.

    Args:
        seen: `[B|1, H|1, rows|1, 1]`, of any integer dtype and value.
    """
    return _softmax(logits, torch.arange(logits.shape[-1], device=logits.device) < seen)


def _softmax(logits: Tensor, eligible: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    eligible = eligible & (logits != float("-inf"))
    return logits.masked_fill(~eligible, float("-inf")).softmax(dim=-1).masked_fill(~eligible, 0.0)

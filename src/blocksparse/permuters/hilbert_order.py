"""Image and video tokens along a Hilbert curve (SpargeAttn, section 3.7)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(eq=False)
class HilbertOrder(GridOrder):
    """Cells along a Hilbert curve: a block of tokens is a compact piece of the video (SpargeAttn, section 3.7).

    The curve is that of the smallest cube which holds the grid and has a power of two for a side; cells outside
    the grid are left out. Where the grid is such a cube, every step goes to a neighbour; elsewhere a few jump
    (1.5 % of the steps of 13 x 30 x 45). Axes of size 1 do not count: an image gets the curve of a square.
    """

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.grid
        cell = torch.arange(T * H * W, device=device)
        axes = [cell // (H * W), cell // W % H, cell % W]
        axes = [x for x, size in zip(axes, self.grid, strict=True) if size > 1]
        return hilbert_index(axes, bits=(max(self.grid) - 1).bit_length()).argsort() if axes else cell


def hilbert_index(axes: list[Tensor], *, bits: int) -> Tensor:
    """How far along the Hilbert curve of a cube of side `2 ** bits` the cells with these coordinates stand.

    Bit by bit, as J. Skilling, Programming the Hilbert curve (AIP Conference Proceedings 707, 2004).

    Args:
        axes: non-negative int64 coordinates, one tensor per axis, all of one shape `[...]`.
        bits: of a coordinate; times the number of axes at most 63.
    """
    x, n = list(axes), len(axes)
    for level in range(bits - 1, 0, -1):
        below = (1 << level) - 1
        for i in range(n):
            # In the upper half of an axis the first axis runs backwards below this bit;
            # in the lower half this axis and the first one change places there.
            backwards = (x[i] >> level & 1) * below
            exchanged = (x[0] ^ x[i]) & (below - backwards)
            x[0] = x[0] ^ backwards ^ exchanged
            x[i] = x[i] ^ exchanged

    # From here the bits of all axes, highest first, are one Gray code: decode it.
    for i in range(1, n):
        x[i] = x[i] ^ x[i - 1]
    carry, shift = x[-1], 1
    while shift < bits:
        carry, shift = carry ^ carry >> shift, 2 * shift
    x = [axis ^ carry >> 1 for axis in x]

    bit = torch.arange(bits, device=x[0].device)
    spread = [((axis.unsqueeze(-1) >> bit & 1) << bit * n).sum(-1) for axis in x]
    return sum((axis << n - 1 - i for i, axis in enumerate(spread)), torch.zeros_like(x[0]))

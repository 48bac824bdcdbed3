"""Image and video tokens along a Hilbert curve (SpargeAttn, section 3.7)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(cache_hash=True)
class HilbertOrder(GridOrder):
    """Cells along a Hilbert curve: a block of tokens is a compact piece of the video (SpargeAttn, section 3.7).

    The curve is that of the smallest cube which contains the grid and whose side is a power of two; cells outside
    the grid are left out. If the grid is such a cube, every step leads to a neighbour; in other grids a few steps
    do not (1.5 % of those of 13 x 30 x 45). Axes of size 1 are ignored, so an image gets the curve of a square.
    """

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        cell = torch.arange(T * H * W, device=device)
        axes = [cell // (H * W), cell // W % H, cell % W]
        axes = [x for x, size in zip(axes, self.sizes, strict=True) if size > 1]
        return hilbert_index(axes, bits=(max(self.sizes) - 1).bit_length()).argsort() if axes else cell


def hilbert_index(axes: list[Tensor], *, bits: int) -> Tensor:
    """The index along the Hilbert curve of a cube of side `2 ** bits` of the cells with these coordinates.

    The method goes bit by bit: J. Skilling, Programming the Hilbert curve (AIP Conference Proceedings 707, 2004).

    Args:
        axes: non-negative int64 coordinates, one tensor per axis, all of one shape `[...]`.
        bits: bits per coordinate; at most 63 for all axes together.
    """
    x, n = list(axes), len(axes)
    for level in range(bits - 1, 0, -1):
        below = (1 << level) - 1
        for i in range(n):
            # In the upper half of axis i the lower bits of the first axis are inverted;
            # in the lower half axis i and the first axis exchange their lower bits.
            backwards = (x[i] >> level & 1) * below
            exchanged = (x[0] ^ x[i]) & (below - backwards)
            x[0] = x[0] ^ backwards ^ exchanged
            x[i] = x[i] ^ exchanged

    # The bits of all axes, the highest bit of each axis first, now form one Gray code, which is decoded here.
    for i in range(1, n):
        x[i] = x[i] ^ x[i - 1]
    carry, shift = x[-1], 1
    while shift < bits:
        carry, shift = carry ^ carry >> shift, 2 * shift
    x = [axis ^ carry >> 1 for axis in x]

    bit = torch.arange(bits, device=x[0].device)
    spread = [((axis.unsqueeze(-1) >> bit & 1) << bit * n).sum(-1) for axis in x]
    return sum((axis << n - 1 - i for i, axis in enumerate(spread)), torch.zeros_like(x[0]))

"""What the kernels of `tile_operands.py` share: groups of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of(scale):
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))[:, None]


@triton.jit
def of_groups(largest, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """The largest of each group, `[tiles, 4]`, where `RUN` neighbours in a row belong to a group."""
    largest = tl.reshape(largest, [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.max(tl.max(largest, 3), 1)


@triton.jit
def of_tokens(x, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """What belongs to groups, `[tiles, 4]`, for each of their tokens, `[ROWS]`."""
    x = tl.broadcast_to(x[:, None, :, None], [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.reshape(x, [ROWS])


@triton.jit
def store_groups(ptr, x, head, part, slots, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Scales of the tiles of `ROWS` slots, the `part`th so many, `[tiles, 4]`."""
    tiles = tl.cdiv(slots, TILE)
    tile = part * (ROWS // TILE) + tl.arange(0, ROWS // TILE)[:, None]
    tl.store(ptr + (head * tiles + tile) * 4 + tl.arange(0, 4)[None, :], x, mask=tile < tiles)

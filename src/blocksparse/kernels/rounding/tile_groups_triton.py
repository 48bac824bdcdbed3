"""What the kernels of `tile_operands.py` share: scales of the four groups of each tile (described there)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of(scale):
    """Inverses of scales `[n]` as `[n, 1]`, 0 where the scale is 0."""
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))[:, None]


@triton.jit
def of_groups(largest, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """The largest of each group, `[tiles, 4]`; runs of `RUN` entries of `largest` `[ROWS]` belong to the groups in turn."""
    largest = tl.reshape(largest, [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.max(tl.max(largest, 3), 1)


@triton.jit
def of_tokens(x, ROWS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr):
    """Numbers of groups `[tiles, 4]`, repeated for each of their tokens, `[ROWS]`; undoes `of_groups`' order."""
    x = tl.broadcast_to(x[:, None, :, None], [ROWS // TILE, TILE // (4 * RUN), 4, RUN])
    return tl.reshape(x, [ROWS])


@triton.jit
def store_groups(ptr, x, head, part, slots, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Stores the scales `x` `[tiles, 4]` of the tiles in `ROWS` slots, which are the `part`-th such run of slots."""
    tiles = tl.cdiv(slots, TILE)
    tile = part * (ROWS // TILE) + tl.arange(0, ROWS // TILE)[:, None]
    tl.store(ptr + (head * tiles + tile) * 4 + tl.arange(0, 4)[None, :], x, mask=tile < tiles)

"""What the kernels over blocks share: where a row of blocks lies, and what its positions say.

A launch tile is some rows times some columns of blocks. It has two axes even if one would do, because Triton 3.7 fails on
sm_100 for sums over the only axis of a tensor.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at
from blocksparse.kernels.common.sizes import REMEMBERED
from blocksparse.kernels.masks.grid import BlockGrid

_COLS = 256
_UNIT = 16  # entries


def plain_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of `x` `[B|1, H|1, rows|1, cols|1]`, 0 for an axis of one entry, which holds for all."""
    return _plain_strides(x.shape, x.stride())


def strides(x: Tensor) -> tuple[int, ...]:
    """The same, but those of all axes except the last are as `alike` gives them, in units of as many entries as come last.

    The unit is 16 where all of them are multiples of 16, and else 1. The compiler knows of a factor of 16 that every row
    begins at such a multiple, and then loads four entries at a time.
    """
    return _strides(x.shape, x.stride())


# Shapes alone decide these numbers, and a call asks for them some twenty times: so they are remembered.
@functools.lru_cache(maxsize=REMEMBERED)
def _plain_strides(shape: tuple[int, ...], of_memory: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([0 if size == 1 else stride for size, stride in zip(shape, of_memory, strict=True)])


@functools.lru_cache(maxsize=REMEMBERED)
def _strides(shape: tuple[int, ...], of_memory: tuple[int, ...]) -> tuple[int, ...]:
    *outer, of_cols = _plain_strides(shape, of_memory)
    unit = 1 if any(stride % _UNIT for stride in outer) else _UNIT
    return *alike(*(stride // unit for stride in outer)), of_cols, unit


def positions(grid: BlockGrid, *, plain: bool = False) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    """First and last positions of query blocks, then of key blocks; and their strides, or their `plain` strides."""
    a, b, c, d = tensors = grid.q_first, grid.q_last, grid.k_first, grid.k_last
    of_memory = a.stride(), b.stride(), c.stride(), d.stride()
    return tensors, _of_positions((a.shape, b.shape, c.shape, d.shape), of_memory, plain)


@functools.lru_cache(maxsize=REMEMBERED)
def _of_positions(
    shapes: tuple[tuple[int, ...], ...], of_memory: tuple[tuple[int, ...], ...], plain: bool
) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_plain_strides if plain else _strides, shapes, of_memory))


def tile_of_blocks(entries: int) -> dict[str, int]:
    """Rows and columns of a launch tile for a grid of any size: what lies outside costs less than another compilation."""
    return {"ROWS": max(entries // _COLS, 1), "COLS": _COLS}


@triton.jit
def tile(ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's batch entry, head, rows `[ROWS, 1]`, and the first columns `[1, COLS]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    return tl.program_id(2), tl.program_id(1), row, tl.arange(0, COLS)[None, :]


@triton.jit
def tile_of_grid(cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same if programs divide columns too: the first axis of programs runs over all launch tiles of a head."""
    wide = tl.cdiv(cols, COLS)
    row = tl.program_id(0) // wide * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % wide * COLS + tl.arange(0, COLS)[None, :]
    return tl.program_id(2), tl.program_id(1), row, col


@triton.jit
def rows_at(ptr, strides, b, h, row, ALIKE: tl.constexpr = True):
    """Pointers `[ROWS, 1]` to the first entries of rows; with `ALIKE`, `strides` are those of `strides`, else plain ones."""
    if ALIKE:
        at = ptr + (head_at(strides, b, h) + row.to(tl.int64) * (strides[2] >> 4)) * strides[4]
    else:
        at = ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    return at


@triton.jit
def load_blocks(ptr, strides, b, h, row, col, there, OTHER: tl.constexpr):
    """Entries `[ROWS, COLS]` of a tensor of blocks `[B|1, H|1, rows|1, cols|1]`; `OTHER` where they are not `there`."""
    return tl.load(rows_at(ptr, strides, b, h, row) + col * strides[3], mask=there, other=OTHER)


@triton.jit
def load_positions(pointers, strides, b, h, row, col, there, inside, ALIKE: tl.constexpr = True):
    """Positions of a launch tile: `q_first` and `q_last` `[ROWS, 1]`, `k_first` and `k_last` `[ROWS, COLS]`."""
    q_first = tl.load(rows_at(pointers[0], strides[0], b, h, row, ALIKE), mask=there, other=0)
    q_last = tl.load(rows_at(pointers[1], strides[1], b, h, row, ALIKE), mask=there, other=-1)
    k_first_at = rows_at(pointers[2], strides[2], b, h, row, ALIKE) + col * strides[2][3]
    k_last_at = rows_at(pointers[3], strides[3], b, h, row, ALIKE) + col * strides[3][3]
    k_first = tl.load(k_first_at, mask=inside, other=0)
    k_last = tl.load(k_last_at, mask=inside, other=-1)
    return q_first, q_last, k_first, k_last


@triton.jit
def visible_blocks(q_first, q_last, k_first, k_last, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`BlockGrid.visible` of a launch tile; `WINDOW` is the grid's, and None is compiled away."""
    visible = k_last >= 0
    if CAUSAL:
        visible = visible & (k_first <= q_last)
    if WINDOW is not None:
        visible = visible & (k_last > q_first - WINDOW)
    return visible


@triton.jit
def diagonal_blocks(visible, q_first, k_last, CAUSAL: tl.constexpr):
    """`BlockGrid.diagonal` of a launch tile."""
    if CAUSAL:
        diagonal = visible & (k_last >= q_first)
    else:
        diagonal = tl.zeros_like(visible)
    return diagonal


@triton.jit
def full_blocks(q_first, q_last, k_first, k_last, k_whole, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`BlockGrid.full` of a launch tile."""
    full = k_whole != 0
    if CAUSAL:
        full = full & (k_last <= q_first)
    if WINDOW is not None:  # only then are `q_last` and `k_first` looked at
        full = full & (k_first > q_last - WINDOW)
    return full


@triton.jit
def any_of(x):
    """Whether any entry of a tensor of two axes is true."""
    return tl.max(tl.max(x.to(tl.int32), 0), 0) > 0

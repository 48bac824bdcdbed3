"""The Triton kernel of `block_places` and `block_bounds`: some programs take blocks of queries, the others blocks of keys."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.memory import empty_together
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike, head_at, head_strides
from blocksparse.kernels.positions.block_bounds import Bounds
from blocksparse.launch.launches import remembered

_NEVER = tl.constexpr(2**31 - 1)
_TILE = 2048  # places that a program works on at a time


def block_bounds_triton(q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int) -> Bounds:
    """Launch the kernel; arguments as of `block_bounds`."""
    M, slots, device = q_position.shape[-1], k_position.shape[-1], q_position.device
    return _launch(q_position, k_position, M, slots, q_block, k_block, heads, 0, device)[2]


def block_places_triton(
    q: Tensor, k: Tensor, q_index: Tensor | None, k_index: Tensor | None, q_block: int, k_block: int, offset: int
) -> tuple[Tensor, Tensor, Bounds]:
    """Launch the kernel; arguments as of `block_places`."""
    slots = k.shape[2] if k_index is None else k_index.shape[-1]
    return _launch(q_index, k_index, q.shape[2], slots, q_block, k_block, q.shape[1], offset, q.device)


def _launch(
    q_index: Tensor | None,
    k_index: Tensor | None,
    M: int,
    slots: int,
    q_block: int,
    k_block: int,
    heads: int,
    offset: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Bounds]:
    """Positions are made only where the maps, which are then returned, do not say them already."""
    q_index, k_index = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_index, k_index))
    maps = None if q_index is None else q_index.shape, None if k_index is None else k_index.shape
    plan = _plan(*maps, M, slots, q_block, k_block, heads, offset)
    q_first, q_last, k_first, k_last, *made = empty_together(torch.int32, device, *plan.outputs)
    q_made, k_made = made[0] if plan.q_missing else None, made[-1] if plan.k_missing else None
    k_whole = torch.empty(k_first.shape, dtype=torch.bool, device=device)
    _kernel[plan.grid](
        q_index, k_index, q_made, k_made, q_first, q_last, k_first, k_last, k_whole,
        None if q_index is None else alike(*head_strides(q_index), 0),
        None if k_index is None else alike(*head_strides(k_index), k_index.stride(2) if k_index.shape[2] > 1 else 0),
        *plan.sizes, M, slots, offset % q_block, offset,
        **plan.constants,
        num_warps=4,
    )  # fmt: skip
    q_position, k_position = q_index if q_made is None else q_made, k_index if k_made is None else k_made
    assert q_position is not None  # a map that is missing was made
    assert k_position is not None
    return q_position, k_position, (q_first, q_last, k_first, k_last, k_whole)


class _Plan(NamedTuple):
    """What sizes alone decide of a launch."""

    outputs: list[tuple[int, ...]]  # shapes of the four bounds, then of the positions that are made
    q_missing: bool  # whether positions of queries are made
    k_missing: bool
    grid: tuple[int]
    sizes: tuple[int, ...]  # programs of queries, heads of the maps, key maps of a head, rows and columns
    constants: dict[str, int]


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(
    of_queries: tuple[int, ...] | None,
    of_keys: tuple[int, ...] | None,
    M: int,
    slots: int,
    q_block: int,
    k_block: int,
    heads: int,
    offset: int,
) -> _Plan:
    """The plan for maps of these shapes; None where there is no map."""
    rows, cols = cdiv(offset % q_block + M, q_block), cdiv(slots, k_block)
    Bq, Qh = (1, 1) if of_queries is None else of_queries[:2]
    Bk, Kh, G = (1, 1, 1) if of_keys is None else of_keys[:3]
    q_copies, k_copies = (1 if H == 1 else heads // H for H in (Qh, Kh))
    q_bound, k_bound = (Bq, Qh * q_copies, rows, 1), (Bk, Kh * k_copies, G, cols)
    outputs: list[tuple[int, ...]] = [q_bound, q_bound, k_bound, k_bound]
    if q_missing := of_queries is None or offset > 0 or M % q_block > 0:
        outputs.append((Bq, Qh, rows * q_block))
    if k_missing := of_keys is None or slots % k_block > 0:
        outputs.append((Bk, Kh, G, cols * k_block))
    q_wide, k_wide = (min(power_of_2(block), _TILE) for block in (q_block, k_block))
    q_programs = Bq * Qh * cdiv(rows, _TILE // q_wide)
    k_programs = Bk * Kh * G * cdiv(cols, _TILE // k_wide)
    constants = {
        "Q_BLOCK": q_block, "K_BLOCK": k_block, "Q_WIDE": q_wide, "K_WIDE": k_wide, "TILE": _TILE,
        "Q_COPIES": q_copies, "K_COPIES": k_copies,
    }  # fmt: skip
    return _Plan(
        outputs, q_missing, k_missing, (q_programs + k_programs,), (q_programs, Qh, Kh, G, rows, cols), constants
    )


@triton.jit
def _side(
    pid, index_ptr, made_ptr, first_ptr, last_ptr, whole_ptr, strides, heads, G, blocks, tokens, lead, offset,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores positions and bounds of `ROWS` blocks of one map; `WHOLE` says whether emptiness is stored, too."""
    tiles = tl.cdiv(blocks, ROWS)
    row = pid % tiles * ROWS + tl.arange(0, ROWS)
    g = pid // tiles % G
    head = pid // tiles // G  # its number among the heads of all batch entries
    there = row < blocks
    first = tl.full([ROWS], _NEVER, tl.int32)
    last = tl.full([ROWS], -1, tl.int32)
    empty = tl.zeros([ROWS], tl.int32)
    for start in range(0, BLOCK, WIDE):
        column = start + tl.arange(0, WIDE)
        inside = there[:, None] & (column < BLOCK)[None, :]
        place = row[:, None] * BLOCK + column[None, :]
        slot = place - lead
        token = inside & (slot >= 0) & (slot < tokens)
        if index_ptr is None:
            position = tl.where(token, slot + offset, -1)
        else:
            source = index_ptr + head_at(strides, head // heads, head % heads) + g.to(tl.int64) * (strides[2] >> 4)
            position = tl.load(source + slot, mask=token, other=-1)
            position = tl.where(position >= 0, position + offset, -1)
        if made_ptr is not None:
            tl.store(made_ptr + (head * G + g).to(tl.int64) * blocks * BLOCK + place, position, mask=inside)
        first = tl.minimum(first, tl.min(tl.where(position >= 0, position, _NEVER), 1))
        last = tl.maximum(last, tl.max(position, 1))
        empty += tl.sum((inside & (position < 0)).to(tl.int32), 1)
    for copy in tl.static_range(COPIES):
        at = ((head * COPIES + copy).to(tl.int64) * G + g) * blocks + row
        tl.store(first_ptr + at, first, mask=there)
        tl.store(last_ptr + at, last, mask=there)
        if WHOLE:
            tl.store(whole_ptr + at, empty == 0, mask=there)


@remembered
@triton.jit(do_not_specialize=["q_programs", "G", "rows", "cols", "M", "slots", "lead", "offset"])
def _kernel(
    q_ptr, k_ptr, q_made_ptr, k_made_ptr, q_first_ptr, q_last_ptr, k_first_ptr, k_last_ptr, k_whole_ptr,
    q_strides, k_strides,
    q_programs, q_heads, k_heads, G, rows, cols, M, slots, lead, offset,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, Q_WIDE: tl.constexpr, K_WIDE: tl.constexpr, TILE: tl.constexpr,
    Q_COPIES: tl.constexpr, K_COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < q_programs:
        _side(
            pid, q_ptr, q_made_ptr, q_first_ptr, q_last_ptr, k_whole_ptr, q_strides, q_heads, 1, rows, M, lead, offset,
            Q_BLOCK, Q_WIDE, TILE // Q_WIDE, Q_COPIES, False,
        )  # fmt: skip
    else:
        _side(
            pid - q_programs, k_ptr, k_made_ptr, k_first_ptr, k_last_ptr, k_whole_ptr, k_strides, k_heads, G, cols,
            slots, 0, 0, K_BLOCK, K_WIDE, TILE // K_WIDE, K_COPIES, True,
        )  # fmt: skip

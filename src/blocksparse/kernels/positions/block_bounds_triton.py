"""The Triton kernel of `block_bounds`: some programs take blocks of queries, the others blocks of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.hardware import device_of
from blocksparse.kernels.common.launches_triton import remembered
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import head_strides

_NEVER = tl.constexpr(2**31 - 1)
_TILE = 2048  # places that a program reads at a time


def block_bounds_triton(
    q_position: Tensor, k_position: Tensor, q_block: int, k_block: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as of `block_bounds`."""
    q_position, k_position = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_position, k_position))
    (Bq, Qh, _), (Bk, Kh, G, _) = q_position.shape, k_position.shape
    rows, cols = q_position.shape[-1] // q_block, k_position.shape[-1] // k_block
    q_copies, k_copies = (1 if H == 1 else heads // H for H in (Qh, Kh))
    # Each tensor has memory of its own, and so is aligned: Triton specialises the kernels that read them on that.
    q_first, q_last = (
        torch.empty((Bq, Qh * q_copies, rows, 1), dtype=torch.int32, device=q_position.device) for _ in range(2)
    )
    k_first, k_last = (
        torch.empty((Bk, Kh * k_copies, G, cols), dtype=torch.int32, device=q_position.device) for _ in range(2)
    )
    k_whole = torch.empty(k_first.shape, dtype=torch.bool, device=q_position.device)
    q_wide, k_wide = (min(power_of_2(block), _TILE) for block in (q_block, k_block))
    q_programs = Bq * Qh * cdiv(rows, _TILE // q_wide)
    k_programs = Bk * Kh * G * cdiv(cols, _TILE // k_wide)
    with device_of(q_position):
        _kernel[(q_programs + k_programs,)](
            q_position, k_position, q_first, q_last, k_first, k_last, k_whole,
            head_strides(q_position), (*head_strides(k_position), k_position.stride(2) if G > 1 else 0),
            q_programs, Qh, Kh, G, rows, cols,
            Q_BLOCK=q_block, K_BLOCK=k_block, Q_WIDE=q_wide, K_WIDE=k_wide, TILE=_TILE,
            Q_COPIES=q_copies, K_COPIES=k_copies,
            num_warps=4,
        )  # fmt: skip
    return q_first, q_last, k_first, k_last, k_whole


@triton.jit
def _side(
    pid, position_ptr, first_ptr, last_ptr, whole_ptr, stride_b, stride_h, stride_g, heads, G, blocks,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores the bounds of `ROWS` blocks of one map of positions; `WHOLE` says whether emptiness is stored, too."""
    tiles = tl.cdiv(blocks, ROWS)
    row = pid % tiles * ROWS + tl.arange(0, ROWS)
    g = pid // tiles % G
    head = pid // tiles // G  # its number among the heads of all batch entries
    there = row < blocks
    source = position_ptr + (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    source = source + g.to(tl.int64) * stride_g
    first = tl.full([ROWS], _NEVER, tl.int32)
    last = tl.full([ROWS], -1, tl.int32)
    empty = tl.zeros([ROWS], tl.int32)
    for start in range(0, BLOCK, WIDE):
        place = start + tl.arange(0, WIDE)
        inside = there[:, None] & (place < BLOCK)[None, :]
        position = tl.load(source + row.to(tl.int64)[:, None] * BLOCK + place[None, :], mask=inside, other=-1)
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
@triton.jit(do_not_specialize=["q_programs", "G", "rows", "cols"])
def _kernel(
    q_ptr, k_ptr, q_first_ptr, q_last_ptr, k_first_ptr, k_last_ptr, k_whole_ptr,
    q_strides, k_strides,
    q_programs, q_heads, k_heads, G, rows, cols,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, Q_WIDE: tl.constexpr, K_WIDE: tl.constexpr, TILE: tl.constexpr,
    Q_COPIES: tl.constexpr, K_COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < q_programs:
        _side(
            pid, q_ptr, q_first_ptr, q_last_ptr, k_whole_ptr, q_strides[0], q_strides[1], 0, q_heads, 1, rows,
            Q_BLOCK, Q_WIDE, TILE // Q_WIDE, Q_COPIES, False,
        )  # fmt: skip
    else:
        _side(
            pid - q_programs, k_ptr, k_first_ptr, k_last_ptr, k_whole_ptr, k_strides[0], k_strides[1], k_strides[2],
            k_heads, G, cols, K_BLOCK, K_WIDE, TILE // K_WIDE, K_COPIES, True,
        )  # fmt: skip

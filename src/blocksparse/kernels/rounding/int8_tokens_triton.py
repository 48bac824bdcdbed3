"""The Triton kernel of `int8_queries` and `int8_keys`: one launch each, every token read from memory once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike, head_at
from blocksparse.kernels.rounding.quantize import INT8_LIMIT
from blocksparse.kernels.rounding.quantize_triton import divided, earliest_token, largest_of, read_tokens, scale_of
from blocksparse.launch.launches import remembered

_TILE = 8192  # entries per program, if every token has a scale of its own
_BLOCK_TILE = 16384  # entries that a program holds at a time, if the tokens of a block share a scale
_LIMIT = tl.constexpr(INT8_LIMIT)


def int8_queries_triton(
    q: Tensor,
    index: Tensor | None,
    block: int,
    lead: int,
    shared: bool,
    mean: Tensor | None = None,
    scale: float = 1.0,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; arguments as of `int8_queries`."""
    taken = None
    if mean is not None:
        taken = torch.empty(q.shape[:3] if index is None else index.shape, dtype=torch.float32, device=q.device)
    values, q_scale = _launch(q, index, block, lead, shared, mean, 0, taken, scale, plain)
    return values, q_scale, taken


def int8_keys_triton(
    k: Tensor, index: Tensor | None, block: int, shared: bool, mean: Tensor | None = None, plain_below: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as of `int8_keys`."""
    return _launch(k, index, block, 0, shared, mean, plain_below, None, 1.0, None)


def _launch(
    x: Tensor,
    index: Tensor | None,
    block: int,
    lead: int,
    shared: bool,
    mean: Tensor | None,
    plain_below: int,
    taken: Tensor | None,
    factor: float,
    plain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    D, copies = x.shape[-1], 2 if plain_below else 1
    B, H, slots = x.shape[:3] if index is None else index.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    mean = None if mean is None else mean.contiguous()
    plain = None if plain is None else plain.contiguous().expand(B, H, -1)
    values = torch.empty((B, copies * H, slots, D), dtype=torch.int8, device=x.device)
    scales = torch.empty(values.shape[:3], dtype=torch.float32, device=x.device)
    rows, warps = tile_of(D, block if shared else 0)
    step = block if shared else rows
    _kernel[(copies * cdiv(lead + slots, step), H, B)](
        x, values, scales, index, mean, taken, plain,
        x.stride()[:3], *(None if y is None else alike(*y.stride()[:2]) for y in (index, plain)),
        slots, lead, plain_below, factor,
        D=D, BLOCK_D=power_of_2(D), STEP=step, ROWS=rows, BLOCK=block, SHARED=shared, COPIES=copies,
        HEADS_PER_SOURCE=H // x.shape[1], HEADS_PER_MEAN=1 if mean is None else H // mean.shape[1],
        num_warps=warps,
    )  # fmt: skip
    return values, scales


def tile_of(head_dim: int, block: int) -> tuple[int, int]:
    """How many tokens a program holds at a time, and its warps; `block` is 0 if every token has a scale of its own."""
    block_d = power_of_2(head_dim)
    if block == 0:
        return max(_TILE // block_d, 1), 4
    return max(min(_BLOCK_TILE // block_d, power_of_2(block)), 1), 8


@triton.jit
def _tokens(
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, start, first, slots, dims, centre,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tokens from slot `start + first` on less `centre`, `[ROWS, BLOCK_D]` fp32.

    Also their slots, which of these this program writes, and which of them hold a token.
    """
    place = first + tl.arange(0, ROWS)
    slot = start + place
    inside = (place < STEP) & (slot >= 0) & (slot < slots)
    x, there = read_tokens(
        x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, dims, D, BLOCK_D
    )
    if centre is not None:
        x = tl.where(there[:, None], x - centre, 0.0)
    return x, slot, inside, there


@remembered
@triton.jit(do_not_specialize=["slots", "lead", "plain_below"])
def _kernel(
    x_ptr, values_ptr, scales_ptr, index_ptr, mean_ptr, taken_ptr, plain_ptr,  # what is None is compiled away
    x_strides, index_strides, plain_strides,
    slots, lead, plain_below, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, COPIES: tl.constexpr,
    HEADS_PER_SOURCE: tl.constexpr, HEADS_PER_MEAN: tl.constexpr,
):  # fmt: skip
    # The programs of both copies of the same tokens are neighbours, so that the second one reads them from the cache.
    copy = tl.program_id(0) % COPIES
    start = tl.program_id(0) // COPIES * STEP - lead
    h = tl.program_id(1)
    b = tl.program_id(2)
    H = tl.num_programs(1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    mean = None
    centre = None
    if mean_ptr is not None:
        mean_at = mean_ptr + (b.to(tl.int64) * (H // HEADS_PER_MEAN) + h // HEADS_PER_MEAN) * D
        # Of the second copy no column; a mask of all columns and a scalar one is refused by 3.9's interpreter.
        mean = tl.load(mean_at + dims, mask=dims < tl.where(copy == 0, D, 0), other=0.0)  # [1, BLOCK_D]
        if taken_ptr is None:
            centre = mean
    largest = tl.zeros([1], tl.int32)
    end = STEP
    if COPIES == 2 and STEP <= ROWS:
        earliest = earliest_token(index_ptr, index_strides, b, h, start, slots, STEP, ROWS)
        end = tl.where((copy == 1) & (earliest >= plain_below), 0, STEP)  # nobody reads this block
    if SHARED:
        for first in range(0, end, ROWS):
            x, slot, inside, there = _tokens(
                x_ptr, x_strides, index_ptr, index_strides, b, h, HEADS_PER_SOURCE, start, first, slots, dims,
                centre, D, BLOCK_D, STEP, ROWS,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(largest_of(x)[None, :], 1))
    out_h = (b.to(tl.int64) * COPIES + copy) * H + h
    for first in range(0, end, ROWS):  # if one round holds all tokens, none is read again
        x, slot, inside, there = _tokens(
            x_ptr, x_strides, index_ptr, index_strides, b, h, HEADS_PER_SOURCE, start, first, slots, dims,
            centre, D, BLOCK_D, STEP, ROWS,
        )  # fmt: skip
        if taken_ptr is not None:
            taken = tl.sum(x * mean, 1) * factor
            if plain_ptr is not None:
                plain_at = plain_ptr + head_at(plain_strides, b, h)
                plain = tl.load(plain_at + (slot + lead) // BLOCK, mask=inside, other=0)
                taken = tl.where(plain != 0, 0.0, taken)
            tl.store(taken_ptr + out_h * slots + slot, taken, mask=inside)
        if SHARED:
            scale = tl.where(there, scale_of(largest, _LIMIT), 0.0)
        else:
            scale = scale_of(largest_of(x), _LIMIT)
        tl.store(scales_ptr + out_h * slots + slot, scale, mask=inside)
        # Around 1.5 * 2^23 (12582912) neighbouring floats differ by 1, so the sum is rounded to a whole number, ties to
        # even. Its lowest byte is that number in two's complement, since that of 12582912 (0xC00000 in the mantissa) is 0.
        rounded = (divided(x, scale) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        values_at = values_ptr + (out_h * slots + slot)[:, None] * D + dims
        if BLOCK_D == D:
            tl.store(values_at, rounded, mask=inside[:, None])
        else:
            tl.store(values_at, rounded, mask=inside[:, None] & (dims < D))

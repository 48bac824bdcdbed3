"""The Triton kernel of `segment_sort`.

It sorts integers, each of which has a value in its upper bits and the value's place in the segment in its lower ones: an
int64 with 32 bits of each, or for a coarse sort an int32 with `log2(S)` bits of place. So no two are equal, and equal values
keep their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv
from blocksparse.launch.launches import remembered

_TILE = 256  # tokens per program, if segments are shorter than that


def segment_sort_triton(values: Tensor, S: int, coarse: bool = False) -> Tensor:
    """Launch the kernel; arguments as of `segment_sort`, `S` a power of two."""
    B, H, *parts, N = values.shape
    values = values.contiguous()
    index = torch.empty((B, H, N), dtype=torch.int32, device=values.device)
    rows = max(_TILE // S, 1)
    _kernel[(cdiv(N, rows * S), H, B)](
        values, index,
        N, N // S * S,
        S=S, ROWS=rows, COARSE=coarse, PARTS=parts[0] if parts else 1,
        num_warps=min(max(rows * S // 256, 1), 8),
    )  # fmt: skip
    return index


@triton.jit
def _every_fourth(values_at, N, there, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """The sum of every fourth part from `FIRST` on: `torch.sum` adds on GPUs by fours, and so gives the same bits."""
    value = tl.load(values_at + FIRST * N, mask=there, other=0.0)
    for part in tl.static_range(FIRST + 4, PARTS, 4):
        value += tl.load(values_at + part * N, mask=there, other=0.0)
    return value


@remembered
@triton.jit(do_not_specialize=["N", "whole"])
def _kernel(
    values_ptr, index_ptr, N, whole, S: tl.constexpr, ROWS: tl.constexpr, COARSE: tl.constexpr, PARTS: tl.constexpr
):
    start = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * N
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * S
    place = tl.arange(0, S)[None, :]
    token = first + place
    values_at = values_ptr + start * PARTS + token
    value = _every_fourth(values_at, N, token < whole, 0, PARTS)
    for part in tl.static_range(1, min(PARTS, 4)):
        value += _every_fourth(values_at, N, token < whole, part, PARTS)

    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the values, as `whole_numbers`
    bits = tl.where(value != value, 0x7FFFFFFF, bits)
    falling = tl.where(token < whole, ~bits, 0)  # the tail's tokens are all equal, and so stay in place
    if COARSE:
        order = tl.sort((falling & -S) | place, dim=1) & (S - 1)
    else:
        ranked = tl.sort((falling.to(tl.int64) << 32) | place.to(tl.int64), dim=1)
        order = (ranked & 0xFFFFFFFF).to(tl.int32)
    tl.store(index_ptr + start + token, first + order, mask=token < N)

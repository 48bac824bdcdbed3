"""The Triton kernel of `any_head` and `visited_columns`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.launch.launches import remembered

_COLS = 128
_MOST_MEMBERS = 32  # that a program reads at a time


def any_head_triton(keep: Tensor, heads: int) -> Tensor:
    """Launch the kernel; arguments as of `any_head`."""
    return _launch(keep, heads, over_rows=False)


def visited_columns_triton(keep: Tensor, heads: int) -> Tensor:
    """Launch the kernel; arguments as of `visited_columns`."""
    return _launch(keep, heads, over_rows=True).squeeze(2)


def _launch(keep: Tensor, heads: int, *, over_rows: bool) -> Tensor:
    keep = keep.contiguous()
    B, H, rows, cols = keep.shape
    members, out_rows = H // heads, rows
    if over_rows:  # the rows of the heads of a group lie one behind another
        members, out_rows = members * rows, 1
    out = torch.empty((B, heads, out_rows, cols), dtype=torch.bool, device=keep.device)
    _kernel[(cdiv(cols, _COLS), out_rows, B * heads)](
        keep, out, members, out_rows, cols,
        FIRST=over_rows, MEMBERS=min(power_of_2(members), _MOST_MEMBERS), COLS=_COLS,
        num_warps=4,
    )  # fmt: skip
    return out


@remembered
@triton.jit(do_not_specialize=["members", "rows", "cols"])
def _kernel(
    keep_ptr, out_ptr, members, rows, cols, FIRST: tl.constexpr, MEMBERS: tl.constexpr, COLS: tl.constexpr
):
    """`keep` is `[groups, members, rows, cols]`, `out` `[groups, rows, cols]`; with `FIRST` column 0 is kept, too."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    row = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    member = tl.arange(0, MEMBERS)[:, None]
    found = tl.zeros([MEMBERS, COLS], tl.int32)
    for first in range(0, members, MEMBERS):
        at = ((group * members + first + member) * rows + row) * cols + col
        found |= tl.load(keep_ptr + at, mask=(first + member < members) & (col < cols), other=0).to(tl.int32)
    kept = tl.max(found, 0, keep_dims=True) != 0
    if FIRST:
        kept = kept | (col == 0)
    tl.store(out_ptr + (group * rows + row) * cols + col, kept, mask=col < cols)

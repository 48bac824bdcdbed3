"""Which heads a kernel may leave out (`below.py`). Axis 1 of the programs is the head, and axis 2 the batch entry."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.below import Below
from blocksparse.kernels.common.strides_triton import head_strides


def asked(heads: Below | None) -> tuple[Tensor | None, Tensor | None, int | None]:
    """What `not_asked` takes first."""
    if heads is None:
        return None, None, None
    return heads.number.contiguous(), heads.bound, head_strides(heads.bound)[1]


@triton.jit
def not_asked(number_ptr, bound_ptr, bound_stride, OTHERS: tl.constexpr = False):
    """Whether nobody asks for this program's head."""
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    below = tl.load(number_ptr + head).to(tl.float64) < tl.load(bound_ptr + tl.program_id(1) * bound_stride)
    if OTHERS:
        found = below
    else:
        found = below == 0
    return found

"""The Triton kernel of `cell_means`: a program takes some cells of one head, and reads each token once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.memory import empty_together
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.common.strides_triton import alike, head_at
from blocksparse.launch.launches import remembered

_TILE = 1024  # entries that a program adds up at a time: eight to a thread
_UNROLLED = 32  # slots up to which a program asks for all tokens of its cells at once


def cell_means_triton(
    q: Tensor,
    k: Tensor,
    slots: int,
    lead: int = 0,
    padded_tail: bool = False,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for queries and keys together; arguments as of `cell_means`."""
    B, Hq, M, D = q.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_index, k_index = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_index, k_index))
    Hk, N = k.shape[1:3] if k_index is None else k_index.shape[1:]
    q_cells, k_cells, block_d = cdiv(lead + M, slots), cdiv(N, slots), power_of_2(D)
    q_means, k_means = empty_together(q.dtype, q.device, (B, Hq, q_cells, D), (B, Hk, k_cells, D))
    at_a_time = max(_TILE // block_d, 1)
    q_programs, k_programs = cdiv(q_cells, at_a_time), cdiv(k_cells, at_a_time)
    _kernel[(B * (Hq * q_programs + Hk * k_programs),)](
        q, k, q_index, k_index, q_means, k_means,
        q.stride()[:3], k.stride()[:3],
        None if q_index is None else alike(*q_index.stride()[:2]),
        None if k_index is None else alike(*k_index.stride()[:2]),
        q_programs, k_programs, B * Hq * q_programs, M, N, q_cells, k_cells, lead, Hq, Hk, 1, Hk // k.shape[1],
        D=D, BLOCK_D=block_d, SLOTS=slots, UNROLLED=min(slots, _UNROLLED), CELLS=at_a_time, PADDED=padded_tail,
        num_warps=4,
    )  # fmt: skip
    return q_means, k_means


def cell_mean_triton(
    x: Tensor, slots: int, lead: int = 0, padded_tail: bool = False, index: Tensor | None = None
) -> Tensor:
    """Launch the kernel for queries or keys alone: all programs take those."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    index = index if index is None or index.stride(-1) == 1 else index.contiguous()
    (B, Hx, N, D), block_d = x.shape, power_of_2(x.shape[-1])
    H, N = (Hx, N) if index is None else index.shape[1:]
    cells, at_a_time = cdiv(lead + N, slots), max(_TILE // block_d, 1)
    programs, strides = cdiv(cells, at_a_time), x.stride()[:3]
    index_strides = None if index is None else alike(*index.stride()[:2])
    means = x.new_empty((B, H, cells, D))
    _kernel[(B * H * programs,)](
        x, x, index, index, means, means, strides, strides, index_strides, index_strides,
        programs, programs, B * H * programs, N, N, cells, cells, lead, H, H, H // Hx, H // Hx,
        D=D, BLOCK_D=block_d, SLOTS=slots, UNROLLED=min(slots, _UNROLLED), CELLS=at_a_time, PADDED=padded_tail,
        num_warps=4,
    )  # fmt: skip
    return means


def means_of_short_cells_triton(x: Tensor, slots: int, lead: int) -> Tensor | None:
    """`means_of_short_cells` by the same kernel, which calls can repeat, as they cannot what PyTorch computes."""
    missing = -(lead + x.shape[2]) % slots
    if not (lead or missing):
        return None
    (B, H, _, D), ends = x.shape, (x[:, :, : slots - lead], x[:, :, -(slots - missing) :])
    means = x.new_empty((B, H, 2, D))
    for at, mean in enumerate(cell_means_triton(*ends, slots, lead, False, None, None)):
        means[:, :, at : at + 1].copy_(mean)
    return means


@triton.jit
def _means(
    x_ptr, index_ptr, out_ptr, x_strides, index_strides,
    b, h, first, heads, N, cells, lead, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, UNROLLED: tl.constexpr, CELLS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Stores the means of `CELLS` cells from `first` on, of head `h` of `heads`."""
    x_at = x_ptr + b.to(tl.int64) * x_strides[0] + (h // heads_per_source).to(tl.int64) * x_strides[1]
    dims = tl.arange(0, BLOCK_D)[None, :]
    cell = first + tl.arange(0, CELLS)
    start = cell * SLOTS - lead
    sums = tl.zeros([CELLS, BLOCK_D], tl.float32)
    for some in range(0, SLOTS, UNROLLED):
        for place in tl.static_range(UNROLLED):
            slot = start + some + place
            there = (slot >= 0) & (slot < N)
            if SLOTS % UNROLLED != 0:
                there = there & (some + place < SLOTS)
            if index_ptr is not None:
                token = tl.load(index_ptr + head_at(index_strides, b, h) + slot, mask=there, other=0)
            else:
                token = slot
            inside = there[:, None]
            if BLOCK_D != D:
                inside = inside & (dims < D)
            x = tl.load(x_at + token.to(tl.int64)[:, None] * x_strides[2] + dims, mask=inside, other=0.0)
            sums += x.to(tl.float32)
    if PADDED:
        tokens = tl.full([CELLS], SLOTS, tl.int32)
    else:
        tokens = tl.maximum(tl.minimum(start + SLOTS, N) - tl.maximum(start, 0), 1)
    count = tl.broadcast_to(tokens.to(tl.float32)[:, None], [CELLS, BLOCK_D])
    mean = tl.div_rn(sums, count)
    out_at = out_ptr + ((b.to(tl.int64) * heads + h) * cells + cell)[:, None] * D + dims
    inside = (cell < cells)[:, None]
    if BLOCK_D != D:
        inside = inside & (dims < D)
    tl.store(out_at, mean, mask=inside)


@remembered
@triton.jit(do_not_specialize=["q_programs", "k_programs", "of_queries", "M", "N", "q_cells", "k_cells", "lead"])
def _kernel(
    q_ptr, k_ptr, q_index_ptr, k_index_ptr, q_out_ptr, k_out_ptr,
    q_strides, k_strides, q_index_strides, k_index_strides,
    q_programs, k_programs, of_queries, M, N, q_cells, k_cells, lead, q_heads, k_heads, heads_per_query, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, UNROLLED: tl.constexpr, CELLS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The first `of_queries` programs take cells of queries, the others cells of keys."""
    pid = tl.program_id(0)
    if pid < of_queries:
        head = pid // q_programs  # its number among the heads of all batch entries
        _means(
            q_ptr, q_index_ptr, q_out_ptr, q_strides, q_index_strides,
            head // q_heads, head % q_heads, pid % q_programs * CELLS, q_heads, M, q_cells, lead, heads_per_query,
            D, BLOCK_D, SLOTS, UNROLLED, CELLS, PADDED,
        )  # fmt: skip
    else:
        head = (pid - of_queries) // k_programs
        _means(
            k_ptr, k_index_ptr, k_out_ptr, k_strides, k_index_strides,
            head // k_heads, head % k_heads, (pid - of_queries) % k_programs * CELLS, k_heads, N, k_cells, 0,
            heads_per_source, D, BLOCK_D, SLOTS, UNROLLED, CELLS, PADDED,
        )  # fmt: skip

"""The Triton kernels of `block_mean`, `block_means` and `block_similarity`: one program per block, each token read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, asked, head_at, not_asked, rows_of
from blocksparse.kernels.common.sizes import Heads, cdiv, empty_together, power_of_2
from blocksparse.launch.launches import remembered

_TILE = 1024  # entries that a program holds at a time: it is one warp, and many of them share a multiprocessor
_PIECE = 512  # tokens per partial sum of the mean of all tokens


def block_means_triton(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    lead: int = 0,
    padded_tail: bool = False,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for queries and keys together; arguments as in `block_means`."""
    (B, Hq, M, D), lead = q.shape, lead % q_block
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_index, k_index = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_index, k_index))
    Hk, N = k.shape[1:3] if k_index is None else k_index.shape[1:]
    rows, cols, block_d = cdiv(lead + M, q_block), cdiv(N, k_block), power_of_2(D)
    pooled_q, pooled_k = empty_together(torch.float32, q.device, (B, Hq, rows, D), (B, Hk, cols, D))
    _both[(B * (Hq * rows + Hk * cols),)](
        q, k, q_index, k_index, pooled_q, pooled_k,
        q.stride()[:3], k.stride()[:3],
        None if q_index is None else alike(*q_index.stride()[:2]),
        None if k_index is None else alike(*k_index.stride()[:2]),
        B * Hq * rows, M, N, rows, cols, lead, Hq, Hk, Hk // k.shape[1],
        D=D, BLOCK_D=block_d, Q_BLOCK=q_block, K_BLOCK=k_block,
        Q_ROWS=_rows(q_block, block_d), K_ROWS=_rows(k_block, block_d), PADDED=padded_tail,
        num_warps=1,
    )  # fmt: skip
    return pooled_q, pooled_k


def block_similarity_triton(
    x: Tensor, block: int, lead: int = 0, centred: bool = False, index: Tensor | None = None
) -> Tensor:
    """Launch the kernel; arguments as in `block_similarity`."""
    centre = None
    if centred:  # the sum of every piece is divided by the same number, so that the pieces need no weights
        pieces = block_mean_triton(x, _PIECE, padded_tail=True)
        centre = pieces.sum(2) * (_PIECE / x.shape[2])
    return block_mean_triton(x, block, lead, False, index, centre=centre, similarity=True)


def _rows(block: int, block_d: int) -> int:
    """Tokens that a program holds at a time."""
    return max(min(power_of_2(block), _TILE // block_d), 1)


def block_mean_triton(
    x: Tensor,
    block: int,
    lead: int = 0,
    padded_tail: bool = False,
    index: Tensor | None = None,
    heads: Heads = None,
    *,
    centre: Tensor | None = None,
    similarity: bool = False,
) -> Tensor:
    """Launch the kernel; arguments as in `block_mean`. Or it computes the similarity of blocks less a `centre`."""
    lead = lead % block
    B, Hx, N, D = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    H, N = (Hx, N) if index is None else index.shape[1:]
    blocks = cdiv(lead + N, block)
    out = torch.empty((B, H, blocks) if similarity else (B, H, blocks, D), dtype=torch.float32, device=x.device)
    block_d = power_of_2(D)
    _kernel[(blocks, H, B)](
        *asked(heads), x, x if index is None else index, x if centre is None else centre, out,
        x.stride()[:3], None if index is None else alike(*index.stride()[:2]),
        N, blocks, lead, H // Hx,
        D=D, BLOCK_D=block_d, BLOCK=block,
        ROWS=_rows(block, block_d), PADDED=padded_tail, INDEXED=index is not None,
        CENTRED=centre is not None, SIMILARITY=similarity,
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _pooled(
    x_ptr, index_ptr, centre_ptr, out_ptr, x_strides, index_strides,
    b, h, block, heads, N, blocks, lead, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, INDEXED: tl.constexpr, CENTRED: tl.constexpr, SIMILARITY: tl.constexpr,
):  # fmt: skip
    """Stores the mean, or the similarity, of block `block` of head `h` of `heads`."""
    source_h = h // heads_per_source
    dims = tl.arange(0, BLOCK_D)[None, :]
    if CENTRED:
        centre_at = centre_ptr + (b.to(tl.int64) * (heads // heads_per_source) + source_h) * D
        centre = tl.load(centre_at + dims, mask=dims < D, other=0.0)  # [1, BLOCK_D]
    start = block * BLOCK - lead
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, BLOCK, ROWS):
        place = first + tl.arange(0, ROWS)
        slot = start + place
        there = (place < BLOCK) & (slot >= 0) & (slot < N)
        if INDEXED:
            token = tl.load(index_ptr + head_at(index_strides, b, h) + slot, mask=there, other=0)
        else:
            token = slot
        x = rows_of(x_ptr, x_strides, b, source_h, token, there, D, BLOCK_D, False).to(tl.float32)
        if SIMILARITY:
            if CENTRED:
                x = tl.where(there[:, None] & (dims < D), x - centre, 0.0)
            length = tl.sqrt_rn(tl.sum(x * x, 1))
            x = x / tl.where(length == 0.0, 1.0, length)[:, None]
        sums += x
    tokens = BLOCK if PADDED else tl.minimum(start + BLOCK, N) - tl.maximum(start, 0)
    mean = tl.sum(sums, 0)[None, :] / tokens
    out_at = (b.to(tl.int64) * heads + h) * blocks + block
    if SIMILARITY:
        square = tl.sum(mean * mean, 1)  # [1]
        one = tl.arange(0, 1)
        tl.store(out_ptr + out_at + one, tl.where(square > 1.0, 1.0, square))
    else:
        tl.store(out_ptr + out_at * D + dims, mean, mask=dims < D)


@remembered
@triton.jit(do_not_specialize=["N", "blocks", "lead"])
def _kernel(
    number_ptr, bound_ptr, bound_stride, x_ptr, index_ptr, centre_ptr, out_ptr,
    x_strides, index_strides,
    N, blocks, lead, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, INDEXED: tl.constexpr, CENTRED: tl.constexpr, SIMILARITY: tl.constexpr,
):  # fmt: skip
    if number_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if not_asked(number_ptr, bound_ptr, bound_stride):
            return
    _pooled(
        x_ptr, index_ptr, centre_ptr, out_ptr, x_strides, index_strides,
        tl.program_id(2), tl.program_id(1), tl.program_id(0), tl.num_programs(1), N, blocks, lead, heads_per_source,
        D, BLOCK_D, BLOCK, ROWS, PADDED, INDEXED, CENTRED, SIMILARITY,
    )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["q_programs", "M", "N", "rows", "cols", "lead"])
def _both(
    q_ptr, k_ptr, q_index_ptr, k_index_ptr, q_out_ptr, k_out_ptr,
    q_strides, k_strides, q_index_strides, k_index_strides,
    q_programs, M, N, rows, cols, lead, q_heads, k_heads, heads_per_source,
    D: tl.constexpr, BLOCK_D: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Some programs take blocks of queries, the others blocks of keys."""
    pid = tl.program_id(0)
    if pid < q_programs:
        head = pid // rows  # its number among the heads of all batch entries
        _pooled(
            q_ptr, q_index_ptr, None, q_out_ptr, q_strides, q_index_strides,
            head // q_heads, head % q_heads, pid % rows, q_heads, M, rows, lead, 1,
            D, BLOCK_D, Q_BLOCK, Q_ROWS, PADDED, q_index_ptr is not None, False, False,
        )  # fmt: skip
    else:
        head = (pid - q_programs) // cols
        _pooled(
            k_ptr, k_index_ptr, None, k_out_ptr, k_strides, k_index_strides,
            head // k_heads, head % k_heads, (pid - q_programs) % cols, k_heads, N, cols, 0, heads_per_source,
            D, BLOCK_D, K_BLOCK, K_ROWS, PADDED, k_index_ptr is not None, False, False,
        )  # fmt: skip

"""`sparse_attention` on Hopper: some warps load while others compute, and programs take their work from a queue.

`per_sm` programs run on each multiprocessor for the whole launch, and take tiles of queries from the queue of
`hopper/queue.py`, which also explains stages and barriers. Two warps of a program load through the bulk copy engine
(`hopper/loaders.py`): one queries and keys, the other values. Each consumer is four warps, and computes 64 queries
(`hopper/consumer.py`).

Warp specialisation gives each of these roles its own warps and, at the start, moves registers between them: loaders keep
few, consumers get the rest (`registers`, `consumer_registers`).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocksparse.kernels.common.sizes import for_bulk_copies
from blocksparse.kernels.hopper.consumer import consume
from blocksparse.kernels.hopper.launch import copy_back, launch_of, whole_rows
from blocksparse.kernels.hopper.loaders import PANEL, load_keys, load_values, panels
from blocksparse.kernels.hopper.queue import LOADER_REGISTERS, OF_PROMPT, Constants, make_rings, positive
from blocksparse.kernels.hopper.shares import shares_of
from blocksparse.kernels.hopper.softmax import reference_of, scale_and_cap
from blocksparse.kernels.masks.arguments import Lists, LogitChange, TilesOnHopper
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.launch.launches import remembered


def sparse_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Lists,
    positions: TokenPositions,
    tiles: TilesOnHopper,
    scale: float,
    change: LogitChange,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `sparse_attention`."""
    q, scale = positive(q, scale)
    scale, cap = scale_and_cap(scale, change.softcap)
    q, whole, whole_lse = whole_rows(q, out, lse, positions.q_lead)
    q = for_bulk_copies(q)
    keys = v.shape[1], v.shape[2]
    shares = shares_of((q.shape[0], q.shape[1]), keys, v.shape[-1], lists, 64 * tiles.consumers)
    launch = launch_of(
        q,
        whole,
        whole_lse,
        keys,
        lists,
        positions,
        tiles,
        scale,
        entries=None if shares is None else shares.entries,
    )
    piece = min(lists.k_block, tiles.block_n)
    _kernel[launch.grid](
        panels(q, 64),
        *(panels(for_bulk_copies(x), piece) for x in (k, v)),
        panels(whole, 64),
        *((None, None, None) if shares is None else (shares.work, shares.out, shares.sums)),
        positions.window,
        cap,
        reference_of(change.softcap, q.dtype),
        change.sinks,
        *launch.arguments,
        **launch.options,
        **tiles.buffers(q.shape[-1], v.shape[-1]),
        CUT=shares is not None,
    )
    if shares is not None:
        shares.join(whole, whole_lse, change.sinks)
    copy_back((whole, whole_lse), (out, lse), positions.q_lead)


@remembered
@gluon.jit(do_not_specialize=[*OF_PROMPT, "window"])
def _kernel(
    q_source, k_source, v_source, out_target, work_ptr, share_out_ptr, share_sums_ptr, window, cap, reference, sinks_ptr, lse_ptr,
    full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr,
    count_stride_b, count_stride_h, index_stride_b, index_stride_h, lse_stride_b, lse_stride_h,
    q_position_strides, k_position_strides,
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2,
    DQ: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, K_SPLIT: gl.constexpr, Q_SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, Q_IN_ORDER: gl.constexpr, K_IN_ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, Q_BUFFERS: gl.constexpr, OUT_PARTS: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = BLOCK_N // PIECES  # keys that come in one copy
    HALF: gl.constexpr = q_source.dtype
    Q_PANELS: gl.constexpr = DQ // PANEL
    V_PANELS: gl.constexpr = DV // PANEL
    q_pieces = gl.allocate_shared_memory(
        HALF, [Q_BUFFERS * CONSUMERS * Q_PANELS, 1, 1, 64, PANEL], q_source.layout
    )
    k_pieces = gl.allocate_shared_memory(HALF, [STAGES * Q_PANELS * PIECES, 1, 1, PIECE, PANEL], k_source.layout)
    v_pieces = gl.allocate_shared_memory(HALF, [STAGES * V_PANELS * PIECES, 1, 1, PIECE, PANEL], v_source.layout)
    out_pieces = gl.allocate_shared_memory(
        HALF, [CONSUMERS * V_PANELS // OUT_PARTS, 1, 1, 64, PANEL], out_target.layout
    )
    words = gl.allocate_shared_memory(gl.int64, [(3 if CUT else 2) * Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int32, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    sources = (q_source, k_source, v_source, out_target)
    pointers = (
        full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr, lse_ptr, work_ptr,
        share_out_ptr, share_sums_ptr,
    )  # fmt: skip
    bufs = (q_pieces, k_pieces, v_pieces, out_pieces, words, starts)
    strides = (
        (count_stride_b, count_stride_h), (index_stride_b, index_stride_h), q_position_strides, k_position_strides,
        (lse_stride_b, lse_stride_h),
    )  # fmt: skip
    sizes = (tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2)
    change = (window, cap, reference, sinks_ptr)  # what is None is compiled away
    C = Constants(
        DQ, DV, CONSUMERS, BLOCK_N, STAGES, Q_BUFFERS, OUT_PARTS, PIECES, K_SPLIT, Q_SPLIT, CAUSAL, Q_IN_ORDER,
        K_IN_ORDER, False, False, CUT,
    )  # fmt: skip
    bars = make_rings(C)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (first, C, sources, pointers, bars, bufs, strides, sizes, change)),
            (consume, (second, C, sources, pointers, bars, bufs, strides, sizes, change)),
            (load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (first, C, sources, pointers, bars, bufs, strides, sizes, change)),
            (load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [1, 1], [LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip

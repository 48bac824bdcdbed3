"""`sparse_attention` on Hopper: some warps load while others compute, and persistent programs take work items.

`per_sm` programs run on each multiprocessor for the whole launch, and take tiles of queries from the scheduler
(`hopper/tile_scheduler.py`), which also explains stages and barriers. Two warps of a program load through the bulk copy engine
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
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.kernels.hopper.arguments import (
    Buffers,
    Constants,
    Descriptors,
    Inputs,
    LogitChanges,
    Pointers,
    Sizes,
    Strides,
)
from blocksparse.kernels.hopper.consumer import consume
from blocksparse.kernels.hopper.launch import copy_back, launch_of, whole_rows
from blocksparse.kernels.hopper.loaders import BOX_COLS, load_keys, load_values, tma_boxes
from blocksparse.kernels.hopper.softmax import reference_of, scale_and_cap
from blocksparse.kernels.hopper.split_kv import split_kv
from blocksparse.kernels.hopper.tile_scheduler import LOADER_REGISTERS, OF_PROMPT, make_rings, positive
from blocksparse.kernels.masks.arguments import Lists, LogitChange
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
    tiles: HopperTiles,
    scale: float,
    change: LogitChange,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `sparse_attention`."""
    q, scale = positive(q, scale)
    scale, cap = scale_and_cap(scale, change.softcap)
    q, whole, whole_lse = whole_rows(q, out, lse, positions.q_lead)
    q = for_bulk_copies(q)
    keys = v.shape[1], v.shape[2]
    splits = split_kv((q.shape[0], q.shape[1]), keys, v.shape[-1], lists, 64 * tiles.consumers)
    entries = None if splits is None else splits.entries
    launch = launch_of(q, whole, whole_lse, keys, lists, positions, tiles, scale, entries=entries)
    piece = min(lists.k_block, tiles.block_n)
    _kernel[launch.grid](
        tma_boxes(q, 64),
        *(tma_boxes(for_bulk_copies(x), piece) for x in (k, v)),
        tma_boxes(whole, 64),
        *((None, None, None) if splits is None else (splits.work, splits.out, splits.sums)),
        positions.window,
        cap,
        reference_of(change.softcap, q.dtype),
        change.sinks,
        *launch.arguments,
        **launch.options,
        **tiles.buffers(q.shape[-1], v.shape[-1]),
        SPLIT_KV=splits is not None,
    )
    if splits is not None:
        splits.combine(whole, whole_lse, change.sinks)
    copy_back((whole, whole_lse), (out, lse), positions.q_lead)


@remembered
@gluon.jit(do_not_specialize=[*OF_PROMPT, "window"])
def _kernel(
    q_desc, k_desc, v_desc, out_desc, work_ptr, split_out_ptr, split_sums_ptr, window, cap, reference, sinks_ptr, lse_ptr,
    full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, counter_ptr,
    count_stride_b, count_stride_h, index_stride_b, index_stride_h, lse_stride_b, lse_stride_h,
    q_position_strides, k_position_strides,
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2,
    DQ: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, K_SPLIT: gl.constexpr, Q_SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, Q_IN_ORDER: gl.constexpr, K_IN_ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, Q_BUFFERS: gl.constexpr, OUT_PARTS: gl.constexpr, SPLIT_KV: gl.constexpr,
):  # fmt: skip
    PIECE: gl.constexpr = BLOCK_N // PIECES  # keys that come in one copy
    HALF: gl.constexpr = q_desc.dtype
    Q_BOXES: gl.constexpr = DQ // BOX_COLS
    V_BOXES: gl.constexpr = DV // BOX_COLS
    q_pieces = gl.allocate_shared_memory(
        HALF, [Q_BUFFERS * CONSUMERS * Q_BOXES, 1, 1, 64, BOX_COLS], q_desc.layout
    )
    k_pieces = gl.allocate_shared_memory(HALF, [STAGES * Q_BOXES * PIECES, 1, 1, PIECE, BOX_COLS], k_desc.layout)
    v_pieces = gl.allocate_shared_memory(HALF, [STAGES * V_BOXES * PIECES, 1, 1, PIECE, BOX_COLS], v_desc.layout)
    out_pieces = gl.allocate_shared_memory(
        HALF, [CONSUMERS * V_BOXES // OUT_PARTS, 1, 1, 64, BOX_COLS], out_desc.layout
    )
    items = gl.allocate_shared_memory(gl.int64, [(3 if SPLIT_KV else 2) * Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int32, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    C = Constants(
        DQ=DQ, DV=DV, CONSUMERS=CONSUMERS, BLOCK_N=BLOCK_N, STAGES=STAGES, Q_BUFFERS=Q_BUFFERS, OUT_PARTS=OUT_PARTS,
        PIECES=PIECES, K_SPLIT=K_SPLIT, Q_SPLIT=Q_SPLIT, CAUSAL=CAUSAL, Q_IN_ORDER=Q_IN_ORDER, K_IN_ORDER=K_IN_ORDER,
        QK8=False, PV8=False, SPLIT_KV=SPLIT_KV,
    )  # fmt: skip
    given = Inputs(
        Descriptors(q_desc, k_desc, v_desc, out_desc),
        Pointers(
            full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, counter_ptr, lse_ptr, work_ptr,
            split_out_ptr, split_sums_ptr,
        ),
        make_rings(C),
        Buffers(q_pieces, k_pieces, v_pieces, out_pieces, items, starts),
        Strides(
            (count_stride_b, count_stride_h), (index_stride_b, index_stride_h), q_position_strides, k_position_strides,
            (lse_stride_b, lse_stride_h),
        ),
        Sizes(tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2),
    )  # fmt: skip
    change = LogitChanges(window, cap, reference, sinks_ptr)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (first, C, given, change)),
            (consume, (second, C, given, change)),
            (load_keys, (C, given)),
            (load_values, (C, given)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (first, C, given, change)),
            (load_keys, (C, given)),
            (load_values, (C, given)),
        ], [1, 1], [LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip

"""Attention over block lists on Hopper from int8 queries and keys, and values of 16 bits or fp8.

The loaders and the scheduler are those of `sparse_attention_hopper.py`. A consumer differs in four ways.

* Scales, which are loaded together with what they belong to, come in between scores and softmax. A tile of keys that is seen
    whole has one factor for each query and each of the four threads that share a row of scores. So its scales cost as much
    as `scale` alone would. A masked tile has a factor for each key.
* fp8 weights need not move between threads. The registers of the scores are read as those of the next product's operand. Its
    columns stand for keys in another order, and values are stored in that order (`operands_of`).
* The maximum of a row follows its scores late, so that most steps rescale nothing (`hopper/int8.py`).
* The tensor cores add fp8 products in about 14 bits, so after every fourth tile of keys the sums are added in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from blocksparse.kernels.common.names_triton import reinterpret
from blocksparse.kernels.common.sizes import for_bulk_copies
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.kernels.hopper.arguments import Buffers, Constants, Descriptors, Inputs, Pointers, Sizes, Strides
from blocksparse.kernels.hopper.int8 import LAZY, after, kept, masked_tile, operands_of, products, promoted, step
from blocksparse.kernels.hopper.launch import copy_back, launch_of, whole_rows
from blocksparse.kernels.hopper.loaders import (
    BOX_COLS,
    TILE_NUMBERS,
    load_keys,
    load_values,
    tma_boxes,
    tma_numbers,
    transposed_boxes,
)
from blocksparse.kernels.hopper.output import store_lse, store_out
from blocksparse.kernels.hopper.rows import LOWEST, by_thread, of_rows, query_positions
from blocksparse.kernels.hopper.tile_scheduler import (
    LOADER_REGISTERS,
    OF_PROMPT,
    list_extent,
    make_rings,
    positive,
    read,
    unpack_coords,
)
from blocksparse.kernels.masks.arguments import Lists
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.quantize.tile_operands import TileOperands
from blocksparse.launch.launches import remembered

_LOG2_E = gl.constexpr(math.log2(math.e))
_GROUP = gl.constexpr(4)  # tiles of keys whose fp8 products the tensor cores add, before fp32 does


def int8_attention_hopper(
    operands: TileOperands,
    out: Tensor,
    lse: Tensor,
    lists: Lists,
    positions: TokenPositions,
    tiles: HopperTiles,
    scale: float,
    pv_skip: Tensor | None,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `int8_attention`."""
    lead, of = positions.q_lead, operands
    q, scale = positive(of.q, scale)
    q, whole, whole_lse = whole_rows(q, out, lse, lead)
    of_query = [of.q_scale, torch.zeros_like(of.q_scale) if of.taken is None else of.taken]
    if lead:
        of_query = [pad(x, (lead, 0)) for x in of_query]
    q, k, v = (for_bulk_copies(x) for x in (q, of.k, of.v))
    launch = launch_of(q, whole, whole_lse, (k.shape[1] // 2, k.shape[2]), lists, positions, tiles, scale)
    fp8, piece = of.v_tile_log2 is not None, min(lists.k_block, tiles.block_n)
    of_token = of.k_token_scale, of.k_token_scale if of.v_token is None else of.v_token
    of_tile = of.k_tile_scale, of.k_tile_scale if of.v_tile_log2 is None else of.v_tile_log2
    _kernel[launch.grid](
        tma_boxes(q, 64), tma_boxes(k, piece), transposed_boxes(v, piece) if fp8 else tma_boxes(v, piece), tma_boxes(whole, 64),
        *(tma_numbers(x, 64 * tiles.consumers) for x in of_query), *(tma_numbers(x, piece) for x in of_token),
        *(tma_numbers(x.flatten(2), TILE_NUMBERS.value) for x in of_tile), lse if pv_skip is None else pv_skip,
        *launch.arguments, FP8=fp8, SKIP=pv_skip is not None, **launch.options,
    )  # fmt: skip
    copy_back((whole, whole_lse), (out, lse), lead)


@gluon.jit
def _query_numbers(of_queries, buffer, scale, WG: gl.constexpr, ROW: gl.constexpr):
    """Two numbers `[64]` for a consumer's queries, from the first or the second buffer of queries.

    The first makes logits in base 2 of a query's integer products with keys, before the keys' scales. The second is what
    the mean key adds to the logits, in base 2: masked tiles, whose keys hold their mean, subtract it.
    """
    factor = of_queries.index(buffer).slice(WG * 64, 64).load(ROW) * scale
    return factor, of_queries.index(2 + buffer).slice(WG * 64, 64).load(ROW) * _LOG2_E


@gluon.jit
def _threshold(pv_skip_ptr, h, SKIP: gl.constexpr):
    """A head's `pv_skip` as a difference of logits in base 2; 0 if there is none."""
    pv_skip = 0.0
    if SKIP:
        pv_skip = gl.load(pv_skip_ptr + h) * _LOG2_E
    return pv_skip


@gluon.jit
def _consume(WG: gl.constexpr, C, given, SKIP: gl.constexpr):
    """Computes attention of 64 queries of each tile of queries; `WG` is the number of this consumer.

    It goes as `consume` of `hopper/consumer.py`. A step (`hopper/int8.py`) leaves the weights of its keys in
    `weight`, not yet multiplied with their values. `stage` and `phase` are those of the last keys; `visit` counts tiles of
    queries, and `slot` is `visit % 2`.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = given.barriers
    buffers, items, scale = given.buffers, given.buffers.items, given.sizes.scale
    k_position_strides = given.strides.k_position
    HALF: gl.constexpr = buffers.out.dtype
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    EIGHTS: gl.constexpr = gl.NVMMASharedLayout(C.DQ, 8, rank=2)
    PIECE: gl.constexpr = C.BLOCK_N // C.PIECES
    TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(PIECE, 8, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 32 if C.PV8 else 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4 if C.PV8 else 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BASE: gl.constexpr = 8.0 - LAZY if C.PV8 else 0.0  # weights are at most 2^(BASE + LAZY) = 2^8: fp8 holds 448
    GROUP: gl.constexpr = _GROUP if C.PV8 else 1 << 20  # without fp8 all tiles of keys are one group
    q_bufs = reinterpret(buffers.q, buffers.q.dtype, [2 * C.CONSUMERS, 64, C.DQ], EIGHTS)
    k_bufs = reinterpret(buffers.k, buffers.k.dtype, [C.STAGES, C.BLOCK_N, C.DQ], EIGHTS)
    if C.PV8:
        v_bufs = reinterpret(buffers.v, buffers.v.dtype, [C.STAGES * C.PIECES, C.DV, PIECE], TRANSPOSED)
    else:
        v_bufs = reinterpret(buffers.v, buffers.v.dtype, [C.STAGES, C.BLOCK_N, C.DV], HALVES)
    out_bufs = reinterpret(buffers.out, HALF, [C.CONSUMERS, 64, C.DV], HALVES)
    IN_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_queries = reinterpret(buffers.query_numbers, gl.float32, [4, C.CONSUMERS * 64], IN_ORDER)
    of_tokens = reinterpret(buffers.token_numbers, gl.float32, [3 * C.STAGES, C.BLOCK_N], IN_ORDER)
    of_tiles = reinterpret(buffers.tile_numbers, gl.float32, [2 * C.STAGES * C.PIECES, TILE_NUMBERS], IN_ORDER)
    none = gl.zeros([64, C.BLOCK_N], gl.int32, SCORES)
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(none).type.layout))
    lowest = gl.full([64, 4], LOWEST, gl.float32, THREAD)

    # The very first tile of keys has nothing before it to overlap with.
    mbarrier.wait(q_full.index(0), 0)
    item = read(items, 0, 4)
    b, h, h_key, row = unpack_coords(read(items, 2, 4))
    pieces, steps, first, masked = list_extent(item, C)
    last = query_positions(given, b, h, row, WG, C, ROW)
    position_at = b.to(gl.int64) * k_position_strides[0] + h_key.to(gl.int64) * k_position_strides[1]
    q_factor, shift = _query_numbers(of_queries, 0, scale, WG, ROW)
    pv_skip = _threshold(given.pointers.pv_skip, h, SKIP)
    mbarrier.wait(k_full.index(0), 0)
    q = q_bufs.index(WG)
    scores_token = warpgroup_mma(q, k_bufs.index(0).permute([1, 0]), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores_token])
    highest, met, weight, total = masked_tile(
        scores, lowest, lowest, q_factor, shift, of_tokens, given, 0, first, last, position_at, C, SKIP, BASE,
    )  # fmt: skip
    weight = kept(weight, WEIGHT, C, HALF)
    mbarrier.arrive(k_empty.index(0), count=1)
    stage = 0
    phase = 0
    visit = 0
    slot = 0
    while item >= 0:
        pieces, steps, first, masked = list_extent(item, C)
        # The two loops below get two names of one buffer. With one name ptxas 12.8 lets them share what they derive from
        # it, but computes that only before the first loop, which may not run.
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        q_again = q_bufs.index(slot * C.CONSUMERS + WG)
        sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        result = sums
        relative = highest  # the maxima that `result` is relative to
        for _ in range(1, masked):
            stage, phase, highest, met, total, sums, weight, result, relative = step(
                True, C, given, q, k_bufs, v_bufs, of_tokens, of_tiles, last, position_at,
                q_factor, shift, pv_skip, stage, phase, highest, met, total, sums, weight, result, relative,
                not C.PV8, HALF, SKIP, BASE,
            )  # fmt: skip
        for begin in range(masked, steps, GROUP):
            # With fp8 the first product of a group replaces `sums`; at the group's end these are added to `result` in fp32.
            for i in range(begin, gl.minimum(begin + GROUP, steps)):
                stage, phase, highest, met, total, sums, weight, result, relative = step(
                    False, C, given, q_again, k_bufs, v_bufs, of_tokens, of_tiles, last, position_at,
                    q_factor, shift, pv_skip, stage, phase, highest, met, total, sums, weight, result,
                    relative, i > begin if C.PV8 else True, HALF, SKIP, BASE,
                )  # fmt: skip
            if C.PV8:
                result = promoted(result, relative, highest, sums)
                relative = highest

        # The border: the first scores of the next tile of queries during the product with the last values of this one.
        v_stage, v_phase = stage, phase
        stage, phase = after(stage, phase, C)
        mbarrier.arrive(q_empty.index(visit % 2), count=1)
        visit += 1
        slot = 1 - slot
        mbarrier.wait(q_full.index(visit % 2), (visit // 2) & 1)
        item = read(items, visit % 2, 4)
        coords = read(items, 2 + visit % 2, 4)
        mbarrier.wait(k_full.index(stage), phase)
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        operands = operands_of(weight, WEIGHT, C)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        if C.PV8:
            sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        sums_token = products(operands, v_bufs, v_stage, sums, not C.PV8, C)
        next_b, next_h, next_key, next_row = unpack_coords(coords)
        pieces, steps, first, masked = list_extent(item, C)
        last = query_positions(given, next_b, next_h, next_row, WG, C, ROW)
        position_at = next_b.to(gl.int64) * k_position_strides[0] + next_key.to(gl.int64) * k_position_strides[1]
        whole = gl.convert_layout(gl.sum(total, 1), ROW)
        log2_sum = of_rows(highest, ROW) + shift - BASE + gl.log2(whole)
        q_factor, shift = _query_numbers(of_queries, visit % 2, scale, WG, ROW)
        pv_skip = _threshold(given.pointers.pv_skip, next_h, SKIP)
        store_lse(given, b, h, row, log2_sum, whole, WG, C, ROW)
        scores = warpgroup_mma_wait(C.PIECES if C.PV8 else 1, [scores_token])
        if C.PV8:
            sums = promoted(result, relative, highest, warpgroup_mma_wait(0, [sums_token]))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            store_out(given, out_bufs, sums, whole, b, h, row, WG, C)
        highest, met, weight, total = masked_tile(
            scores, lowest, lowest, q_factor, shift, of_tokens, given, stage, first, last, position_at, C, SKIP, BASE,
        )  # fmt: skip
        weight = kept(weight, WEIGHT, C, HALF)
        mbarrier.arrive(k_empty.index(stage), count=1)
        if not C.PV8:
            sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            store_out(given, out_bufs, sums, whole, b, h, row, WG, C)
        b, h, row = next_b, next_h, next_row
    tma.store_wait(0)


@remembered
@gluon.jit(do_not_specialize=OF_PROMPT)
def _kernel(
    q_desc, k_desc, v_desc, out_desc, q_scale_desc, taken_desc, k_token_desc, v_token_desc,
    k_tile_desc, v_tile_desc, pv_skip_ptr,
    lse_ptr, full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, counter_ptr,
    count_stride_b, count_stride_h, index_stride_b, index_stride_h, lse_stride_b, lse_stride_h,
    q_position_strides, k_position_strides,
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2,
    DQ: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, K_SPLIT: gl.constexpr, Q_SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, Q_IN_ORDER: gl.constexpr, K_IN_ORDER: gl.constexpr,
    FP8: gl.constexpr, SKIP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    V_BOXES: gl.constexpr = DV // BOX_COLS
    PIECE: gl.constexpr = BLOCK_N // PIECES
    q_pieces = gl.allocate_shared_memory(gl.int8, [2 * CONSUMERS, 1, 1, 64, DQ], q_desc.layout)
    k_pieces = gl.allocate_shared_memory(gl.int8, [STAGES * PIECES, 1, 1, PIECE, DQ], k_desc.layout)
    if FP8:
        v_pieces = gl.allocate_shared_memory(v_desc.dtype, [STAGES * PIECES, 1, 1, DV, PIECE], v_desc.layout)
    else:
        v_pieces = gl.allocate_shared_memory(
            v_desc.dtype, [STAGES * V_BOXES * PIECES, 1, 1, PIECE, BOX_COLS], v_desc.layout
        )
    out_pieces = gl.allocate_shared_memory(
        out_desc.dtype, [CONSUMERS * V_BOXES, 1, 1, 64, BOX_COLS], out_desc.layout
    )
    items = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int32, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    query_numbers = gl.allocate_shared_memory(gl.float32, [4, 1, 1, CONSUMERS * 64], q_scale_desc.layout)
    token_numbers = gl.allocate_shared_memory(gl.float32, [3 * STAGES * PIECES, 1, 1, PIECE], k_token_desc.layout)
    tile_numbers = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES * PIECES, 1, 1, TILE_NUMBERS], k_tile_desc.layout
    )
    C = Constants(
        DQ=DQ, DV=DV, CONSUMERS=CONSUMERS, BLOCK_N=BLOCK_N, STAGES=STAGES, Q_BUFFERS=2, OUT_PARTS=1, PIECES=PIECES,
        K_SPLIT=K_SPLIT, Q_SPLIT=Q_SPLIT, CAUSAL=CAUSAL, Q_IN_ORDER=Q_IN_ORDER, K_IN_ORDER=K_IN_ORDER, QK8=True, PV8=FP8,
        SPLIT_KV=False,
    )  # fmt: skip
    given = Inputs(
        Descriptors(
            q_desc, k_desc, v_desc, out_desc, q_scale_desc, taken_desc, k_token_desc, v_token_desc, k_tile_desc, v_tile_desc,
        ),
        Pointers(
            full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, counter_ptr, lse_ptr,
            pv_skip=pv_skip_ptr,
        ),
        make_rings(C),
        Buffers(q_pieces, k_pieces, v_pieces, out_pieces, items, starts, query_numbers, token_numbers, tile_numbers),
        Strides(
            (count_stride_b, count_stride_h), (index_stride_b, index_stride_h), q_position_strides, k_position_strides,
            (lse_stride_b, lse_stride_h),
        ),
        Sizes(tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2),
    )  # fmt: skip
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (first, C, given, SKIP)),
            (_consume, (second, C, given, SKIP)),
            (load_keys, (C, given)),
            (load_values, (C, given)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (first, C, given, SKIP)),
            (load_keys, (C, given)),
            (load_values, (C, given)),
        ], [1, 1], [LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip

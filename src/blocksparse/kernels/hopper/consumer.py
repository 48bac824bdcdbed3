"""What a consumer of the attention kernel for Hopper does: four warps that compute attention of 64 queries of each tile.

A consumer starts the scores of the next keys before it multiplies the weights of the last ones with their values. So the
softmax in between is hidden behind matrix products. This holds across the border between two tiles of queries, too: the
next tile's first scores are computed during this one's last products with values.

Weights are relative to a number that a row keeps as long as they do not grow large, and few tiles look for a maximum
(`hopper/softmax.py`). At head dim 64, where products take as long as powers of 2, the two consumers of a program start
matrix products in turn (ping-pong scheduling). Products of one consumer are to run during the softmax of the
other. Without it, both may start theirs at the same time, wait for them together, and then share the unit for powers
of 2. So each waits with the scores of its next keys until those of the other are there. Both consumers of a program
compute the same number of steps (`hopper/tile_scheduler.py`), and so have as many turns.

Two named barriers of the hardware pass the turn. One opens when the 128 threads that wait for it and the 128 that pass it
have come. Triton takes the first few of the 16 that there are.

A sliding window hides keys in masked steps alone. A softcap changes scores as soon as they are there. A sink joins a
row's sum when its keys are done. A kernel without them is compiled as if there were none. Where a softcap bounds all
logits (`hopper/softmax.py`), weights are relative to 1, and no sum is ever rescaled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from blocksparse.kernels.common.names_triton import reinterpret
from blocksparse.kernels.hopper.output import store_lse, store_out, store_split, store_split_sums
from blocksparse.kernels.hopper.rows import (
    LOWEST,
    by_thread,
    masked_scores,
    of_rows,
    partial_sum,
    query_positions,
    rescaled,
    with_sink,
)
from blocksparse.kernels.hopper.softmax import capped, capped_powers, softmax
from blocksparse.kernels.hopper.tile_scheduler import list_extent, read, unpack_coords


@gluon.constexpr_function
def _barrier(operation, consumer):
    return f"bar.{operation} {14 + int(consumer)}, 256; mov.b32 $0, $1;"


@gluon.jit
def ping_pong_wait(WG: gl.constexpr, step):
    """Waits until it is the turn of consumer `WG`; `step` is any number."""
    gl.inline_asm_elementwise(_barrier("sync", WG), "=r,r", [step], gl.int32, is_pure=False, pack=1)


@gluon.jit
def ping_pong_arrive(WG: gl.constexpr, step):
    """Passes the turn to the consumer that is not `WG`."""
    gl.inline_asm_elementwise(_barrier("arrive", 1 - WG), "=r,r", [step], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start_scores(q_bufs, tile, k_bufs, stage, none, C):
    """Starts the product of tile `tile` of queries with the keys of a stage, and returns what to wait for.

    Buffers hold a tile of queries or keys as consecutive parts, whose depth is a power of two: one part, or three for
    head dim 192. Each part's product is added to the last one's, so that to wait for the last is to wait for all.
    """
    PARTS: gl.constexpr = C.DQ // q_bufs.shape[2]
    token = none
    for part in gl.static_range(PARTS):
        token = warpgroup_mma(
            q_bufs.index(tile * PARTS + part),
            k_bufs.index(stage * PARTS + part).permute([1, 0]),
            token,
            use_acc=part > 0,
            is_async=True,
        )
    return token


@gluon.jit
def _made_ready(weight, sums, rescale, WEIGHT: gl.constexpr, HALF: gl.constexpr, reference):
    """Weights as an operand of their product with values, and the sums, rescaled unless there is a `reference`."""
    operand = gl.convert_layout(weight.to(HALF), WEIGHT)
    if reference is None:
        sums = rescaled(sums, rescale)
    return operand, sums


@gluon.jit
def _give_back(k_empty, stage, q_empty, last, C):
    """Gives back a stage of keys whose scores are there; `last` says whether these were the last scores of their tile.

    If there is only one buffer of queries, it is given back with the last scores, so that the next queries are loaded
    during the softmax of these. If there are two, it is given back at the border, which is early enough.

    What the loader then overwrites is no longer read. Only the products that make scores read queries. Each arrival stands
    behind a barrier of the consumer's four warps, all of which have waited for the last product. The work item, the coordinates
    and the split slot, which lie next to the queries, were read before the first product. Every tile is given back exactly once,
    also the empty one at the end, whose buffer no warp waits for. Waits cannot form a circle (`load_keys`): a consumer waits
    for nothing between the last keys of a tile and giving back its queries.
    """
    mbarrier.arrive(k_empty.index(stage), count=1)
    if C.Q_BUFFERS == 1:
        mbarrier.arrive(q_empty.index(0), count=1, pred=last)


@gluon.jit
def _split_slot(items, buffer, C):
    """The split slot that came with a buffer of queries; -1 for a list that is not split."""
    split_slot = -1
    if C.SPLIT_KV:
        split_slot = read(items, 2 * C.Q_BUFFERS + buffer, 4).to(gl.int32)
    return split_slot


@gluon.jit
def _first_weights(scores, scale, reference, HALF: gl.constexpr, ROUNDED: gl.constexpr):
    """Weights of a first tile of keys, their sums, what they are relative to, and a factor of 1 for sums that are 0."""
    x = by_thread(scores)
    highest = gl.full([64, 4], LOWEST, gl.float32, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)))
    if reference is None:
        weight, total, highest, rescale = softmax(scores, highest, scale, True, HALF, ROUNDED)
    else:
        weight = capped_powers(scores, scale)
        total = partial_sum(weight)
        rescale = gl.zeros_like(highest) + 1.0
        highest = gl.zeros_like(highest) + reference
    return weight, total, highest, rescale


@gluon.jit
def consume(WG: gl.constexpr, C, given, change):
    """Computes attention of 64 queries of each tile of queries; `WG` is the number of this consumer.

    `step` counts steps since the program's start, and gives stage and parity (`make_rings`); `visit` counts tiles of
    queries. When a step begins, the weights of the last keys are in `weight`, not yet multiplied with their values.
    `rescale` has the factors that make the sums so far relative to the same numbers as the weights.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = given.barriers
    buffers, items, scale = given.buffers, given.buffers.items, given.sizes.scale
    k_position_strides = given.strides.k_position
    window, cap, reference, sinks_ptr = change
    HALF: gl.constexpr = buffers.q.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # What was measured to be fastest (docs/evidence/kernel-notes.md), and what registers allow.
    ROUNDED: gl.constexpr = C.DV > 64  # weights are rounded as they come, and take half the registers
    BEHIND: gl.constexpr = C.DV == 64 or C.CONSUMERS == 1  # weights and sums are made ready behind the next scores
    PING_PONG: gl.constexpr = C.DV == 64 and C.CONSUMERS == 2
    DEPTH: gl.constexpr = C.DQ & -C.DQ
    q_bufs = reinterpret(buffers.q, HALF, [C.Q_BUFFERS * C.CONSUMERS * C.DQ // DEPTH, 64, DEPTH], SHARED)
    k_bufs = reinterpret(buffers.k, HALF, [C.STAGES * C.DQ // DEPTH, C.BLOCK_N, DEPTH], SHARED)
    v_bufs = reinterpret(buffers.v, HALF, [C.STAGES, C.BLOCK_N, C.DV], SHARED)
    out_bufs = reinterpret(buffers.out, HALF, [C.CONSUMERS, 64, C.DV // C.OUT_PARTS], SHARED)
    none = gl.zeros([64, C.BLOCK_N], gl.float32, SCORES)

    # The very first tile of keys has nothing before it to overlap with.
    mbarrier.wait(q_full.index(0), 0)
    item = read(items, 0, 4)
    b, h, h_key, row = unpack_coords(read(items, C.Q_BUFFERS, 4))
    split_slot = _split_slot(items, 0, C)
    pieces, steps, first, masked = list_extent(item, C)
    last = query_positions(given, b, h, row, WG, C, ROW)
    position_at = b.to(gl.int64) * k_position_strides[0] + h_key.to(gl.int64) * k_position_strides[1]
    mbarrier.wait(k_full.index(0), 0)
    scores_token = _start_scores(q_bufs, WG, k_bufs, 0, none, C)
    scores = warpgroup_mma_wait(0, [scores_token])
    if cap is not None:
        scores = capped(scores, cap)
    scores = masked_scores(scores, last, given, 0, first, position_at, C, window)
    _give_back(k_empty, 0, q_empty, steps == 1, C)
    weight, total, highest, rescale = _first_weights(scores, scale, reference, HALF, ROUNDED)
    if not BEHIND:
        operand = gl.convert_layout(weight.to(HALF), WEIGHT)
    if PING_PONG and WG == 1:
        ping_pong_arrive(WG, given.sizes.M)
    step = 0
    visit = 0
    while item >= 0:
        pieces, steps, first, masked = list_extent(item, C)
        q_tile = (visit % C.Q_BUFFERS) * C.CONSUMERS + WG
        sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        for t in range(1, steps):
            v_stage = step % C.STAGES
            v_phase = (step // C.STAGES) & 1
            step += 1
            stage = step % C.STAGES
            mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
            if PING_PONG:
                ping_pong_wait(WG, step)
            scores_token = _start_scores(q_bufs, q_tile, k_bufs, stage, none, C)
            if BEHIND:
                operand, sums = _made_ready(weight, sums, rescale, WEIGHT, HALF, reference)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
            # Of the two products in flight only the older one, the scores, is waited for.
            scores = warpgroup_mma_wait(1, [scores_token])
            if PING_PONG:
                ping_pong_arrive(WG, step)
            if reference is None:
                if cap is not None:
                    scores = capped(scores, cap)
                if t < masked:
                    scores = masked_scores(scores, last, given, stage, C.PIECES, position_at, C, window)
                _give_back(k_empty, stage, q_empty, t == steps - 1, C)
                if C.STAGES == 1:  # the next values can only be loaded when these are done with
                    sums = warpgroup_mma_wait(0, [sums_token])
                    mbarrier.arrive(v_empty.index(v_stage), count=1)
                weight, parts, highest, rescale = softmax(scores, highest, scale, False, HALF, ROUNDED)
                total = total * rescale + parts
            elif t < masked:  # each way has its powers: the compiler would move them behind the next wait
                scores = masked_scores(capped(scores, cap), last, given, stage, C.PIECES, position_at, C, window)
                _give_back(k_empty, stage, q_empty, t == steps - 1, C)
                weight = capped_powers(scores, scale)
            else:
                _give_back(k_empty, stage, q_empty, t == steps - 1, C)
                weight = capped_powers(capped(scores, cap), scale)
            if reference is not None:
                total = total + partial_sum(weight)
            if reference is not None or C.STAGES > 1:
                sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
                mbarrier.arrive(v_empty.index(v_stage), count=1)
            if not BEHIND:
                operand, sums = _made_ready(weight, sums, rescale, WEIGHT, HALF, reference)

        # The border: the first scores of the next tile of queries during the product with the last values of this one.
        v_stage = step % C.STAGES
        v_phase = (step // C.STAGES) & 1
        step += 1
        stage = step % C.STAGES
        if C.Q_BUFFERS > 1:
            mbarrier.arrive(q_empty.index(visit % C.Q_BUFFERS), count=1)
        visit += 1
        mbarrier.wait(q_full.index(visit % C.Q_BUFFERS), (visit // C.Q_BUFFERS) & 1)
        item = read(items, visit % C.Q_BUFFERS, 4)
        coords = read(items, C.Q_BUFFERS + visit % C.Q_BUFFERS, 4)
        next_slot = _split_slot(items, visit % C.Q_BUFFERS, C)
        mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
        q_tile = (visit % C.Q_BUFFERS) * C.CONSUMERS + WG
        scores_token = _start_scores(q_bufs, q_tile, k_bufs, stage, none, C)
        if BEHIND:
            operand, sums = _made_ready(weight, sums, rescale, WEIGHT, HALF, reference)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
        next_b, next_h, next_key, next_row = unpack_coords(coords)
        pieces, steps, first, masked = list_extent(item, C)
        last = query_positions(given, next_b, next_h, next_row, WG, C, ROW)
        position_at = next_b.to(gl.int64) * k_position_strides[0] + next_key.to(gl.int64) * k_position_strides[1]
        whole = gl.convert_layout(gl.sum(total, 1), ROW)
        beside = of_rows(highest, ROW)
        if sinks_ptr is None:
            log2_sum = beside + gl.log2(whole)
        else:
            log2_sum, whole = with_sink(beside, whole, sinks_ptr, h, split_slot)
        if C.SPLIT_KV and split_slot >= 0:
            store_split_sums(given, split_slot, beside, whole, WG, C, ROW)
        else:
            store_lse(given, b, h, row, log2_sum, whole, WG, C, ROW)
        scores = warpgroup_mma_wait(1, [scores_token])
        if cap is not None:
            scores = capped(scores, cap)
        scores = masked_scores(scores, last, given, stage, first, position_at, C, window)
        _give_back(k_empty, stage, q_empty, steps == 1, C)
        weight, total, highest, rescale = _first_weights(scores, scale, reference, HALF, ROUNDED)
        sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        if not BEHIND:
            operand = gl.convert_layout(weight.to(HALF), WEIGHT)
        if C.SPLIT_KV and split_slot >= 0:
            store_split(given, sums, whole, split_slot, WG, C)
        else:
            store_out(given, out_bufs, sums, whole, b, h, row, WG, C)
        b, h, row, split_slot = next_b, next_h, next_row, next_slot
    if PING_PONG and WG == 0:
        ping_pong_wait(WG, step)
    tma.store_wait(0)

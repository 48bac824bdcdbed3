"""The same attention on Hopper's own units: warps that load, and warps that compute, at the same time.

One program per SM takes tiles of queries from a queue. Two warps load, one keys and queries, the other values, through
the bulk copy engine; each consumer, four warps, computes 64 queries. A consumer starts the scores of the next
keys before it multiplies the weights of the last ones with their values, so that the softmax in between is hidden
behind matrix products, and that holds over the border between two tiles of queries too.

A row's list is walked from its end, so that partial blocks, which are masked, come first: the first keys of a tile
are always masked, and every later step knows from the counts whether it is. Blocks narrower than `BLOCK_N` fill
one tile of keys together, from anywhere; an odd one stands alone in the first, masked, tile.
"""

# Annotations stay what they are: Triton reads those of `_Constants`.

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate  # no public name up to Triton 3.7

from blocksparse.kernels.sparse_attention_triton import batch_head_strides

_PANEL = gl.constexpr(64)  # columns of one bulk copy: 128 bytes, the widest swizzle
_PANEL_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=4)
_NEVER = gl.constexpr(2**31 - 1)
_LOADER_REGISTERS = gl.constexpr(24)
_LOWEST = gl.constexpr(-1.0e30)  # of a row's maximum: where nothing is allowed, weights come to 0


def sparse_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    full_count: Tensor,
    partial_count: Tensor,
    index: Tensor,
    q_position: Tensor,
    k_position: Tensor,
    q_block: int,
    k_block: int,
    q_lead: int,
    causal: bool,
    scale: float,
    consumers: int,
    block_n: int,
    num_stages: int,
    per_sm: int,
    q_in_order: bool,
    k_in_order: bool,
) -> None:
    """Fills `out` and `lse`; the arguments are those of `sparse_attention` and of `HopperTiles`."""
    if scale <= 0:  # the maximum is taken before the scale comes in
        q, scale = (torch.zeros_like(q), 1.0) if scale == 0 else (-q, -scale)
    filled = out, lse
    if q_lead:  # the copy engine takes no negative row
        q = pad(q, (0, 0, q_lead, 0))
        out, lse = (x.new_empty((*q.shape[:3], *x.shape[3:])) for x in filled)
    B, Hq, M, D = q.shape
    _, Hk, N, Dv = v.shape
    block_m, piece = 64 * consumers, min(k_block, block_n)
    rows = full_count.shape[-1] * (q_block // block_m)
    tiles = B * Hq * rows
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count * per_sm
    queue = torch.zeros(1, dtype=torch.int32, device=q.device)
    _kernel[(min(programs, tiles),)](
        _descriptor(q, 64), _descriptor(k, piece), _descriptor(v, piece), _descriptor(out, 64), lse,
        full_count, partial_count, index, q_position, k_position, queue,
        batch_head_strides(full_count), batch_head_strides(index),
        batch_head_strides(q_position), batch_head_strides(k_position), lse.stride()[:2],
        tiles, M, N, index.shape[-1], rows, Hk, Hq // Hk, Hq // full_count.shape[1],
        N - M if causal else 0, scale * math.log2(math.e),
        DQ=_padded(D), DV=_padded(Dv), CONSUMERS=consumers, BLOCK_N=block_n, STAGES=num_stages,
        PIECES=block_n // piece, K_SPLIT=k_block // piece, Q_SPLIT=q_block // block_m,
        CAUSAL=causal, Q_IN_ORDER=q_in_order, K_IN_ORDER=k_in_order,
        CONSUMER_REGISTERS=consumer_registers(consumers, per_sm),
        num_warps=4, maxnreg=registers(consumers, per_sm),
    )  # fmt: skip
    if q_lead:
        for x, padded in zip(filled, (out, lse), strict=True):
            x.copy_(padded[:, :, q_lead:])


def registers(consumers: int, per_sm: int) -> int:
    """Of each thread at launch. Warps come in fours: the consumers', and one four that holds both loaders."""
    return 65536 // (per_sm * (consumers + 1) * 128) // 8 * 8


def consumer_registers(consumers: int, per_sm: int) -> int:
    """What is left for a thread of a consumer once the loaders have given theirs back."""
    return (registers(consumers, per_sm) * (consumers + 1) - _LOADER_REGISTERS.value) // consumers // 8 * 8


def _padded(D: int) -> int:
    """Whole panels, a power of two of them."""
    return 64 if D <= 64 else 128


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Panels of `rows` rows of `[B, H, N, D]`."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, _PANEL.value], _PANEL_LAYOUT)


@_aggregate
class _Constants:
    """What a kernel is compiled for. Constants in a plain tuple would turn into run-time values."""

    DQ: gl.constexpr  # padded head dims
    DV: gl.constexpr
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr  # keys per tile
    STAGES: gl.constexpr
    PIECES: gl.constexpr  # parts of blocks that fill a tile
    K_SPLIT: gl.constexpr  # pieces per block
    Q_SPLIT: gl.constexpr  # tiles of queries per row of blocks
    CAUSAL: gl.constexpr
    Q_IN_ORDER: gl.constexpr
    K_IN_ORDER: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, DQ, DV, CONSUMERS, BLOCK_N, STAGES, PIECES, K_SPLIT, Q_SPLIT, CAUSAL, Q_IN_ORDER, K_IN_ORDER
    ):
        self.DQ = gl.constexpr(DQ)
        self.DV = gl.constexpr(DV)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.PIECES = gl.constexpr(PIECES)
        self.K_SPLIT = gl.constexpr(K_SPLIT)
        self.Q_SPLIT = gl.constexpr(Q_SPLIT)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.Q_IN_ORDER = gl.constexpr(Q_IN_ORDER)
        self.K_IN_ORDER = gl.constexpr(K_IN_ORDER)


@gluon.jit
def _place(word, rows, kv_heads, group):
    """Batch, query head, KV head and row of a tile: KV head by KV head, the last rows first."""
    tile = (word & 0xFFFFFF).to(gl.int32)
    per_key = rows * group
    key = tile // per_key
    within = tile % per_key
    h_key = key % kv_heads
    return key // kv_heads, h_key * group + within % group, h_key, rows - 1 - within // group


@gluon.jit
def _packed(b, h, h_key, row):
    """A place in 64 bits."""
    return (b.to(gl.int64) << 48) | (h.to(gl.int64) << 32) | (h_key.to(gl.int64) << 16) | row


@gluon.jit
def _unpacked(place):
    return (
        (place >> 48).to(gl.int32), ((place >> 32) & 0xFFFF).to(gl.int32), ((place >> 16) & 0xFFFF).to(gl.int32),
        (place & 0xFFFF).to(gl.int32),
    )  # fmt: skip


@gluon.jit
def _extent(word, C):
    """Of a row's list: pieces in all, tiles of keys, pieces in the first of them, and how many tiles are masked."""
    word = gl.maximum(word, 0)
    full = ((word >> 24) & 0xFFFFF).to(gl.int32) * C.K_SPLIT
    partial = (word >> 44).to(gl.int32) * C.K_SPLIT
    pieces = full + partial
    steps = gl.maximum((pieces + C.PIECES - 1) // C.PIECES, 1)
    first = pieces - (steps - 1) * C.PIECES
    masked = 1 + (gl.maximum(partial - first, 0) + C.PIECES - 1) // C.PIECES
    return pieces, steps, first, masked


@gluon.jit
def _counts(tile, full_count_ptr, partial_count_ptr, count_strides, rows, kv_heads, group, heads_per_mask, C):
    """Full and partial blocks of a tile's row."""
    b, h, h_key, row = _place(tile, rows, kv_heads, group)
    at = (
        b.to(gl.int64) * count_strides[0]
        + (h // heads_per_mask).to(gl.int64) * count_strides[1]
        + row // C.Q_SPLIT
    )
    return gl.load(full_count_ptr + at), gl.load(partial_count_ptr + at)


@gluon.jit
def _word(tile, tiles, full, partial):
    """A tile and the counts of its row in 64 bits; -1 after the last tile.

    One word, because Triton 3.6 drops a value that a loop carries only to bound an inner loop.
    """
    word = tile.to(gl.int64) | (full.to(gl.int64) << 24) | (partial.to(gl.int64) << 44)
    return gl.where(tile < tiles, word, -1)


@gluon.jit
def _list_at(b, h, row, index_strides, cols, heads_per_mask, C):
    """Where a row's list begins."""
    at = b.to(gl.int64) * index_strides[0] + (h // heads_per_mask).to(gl.int64) * index_strides[1]
    return at + (row // C.Q_SPLIT).to(gl.int64) * cols


@gluon.jit
def _turn(pieces, first, t, p, C):
    """Which piece of a row's list is piece `p` of tile `t` of keys, counted from the end."""
    before = gl.where(t == 0, 0, first + (t - 1) * C.PIECES)
    return gl.maximum(pieces - 1 - before - p, 0)


@gluon.jit
def _start(block, pieces, turn, C):
    """First slot of a piece of `block`; slot 0 where the list is empty."""
    return gl.where(pieces > 0, block * C.K_SPLIT + turn % C.K_SPLIT, 0) * (C.BLOCK_N // C.PIECES)


@gluon.jit
def _copy(source, b, h, start, barrier, pieces, at, STRIDE: gl.constexpr, PANELS: gl.constexpr):
    """Rows from `start` on, panel by panel, into `pieces[at]`, `pieces[at + STRIDE]` and so on."""
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            source, [b, h, start, panel * _PANEL], barrier, pieces.index(at + panel * STRIDE)
        )


@gluon.jit
def _copy_keys(
    k_source, index_ptr, k_pieces, k_full, k_empty, starts, block, list_at, b, h_key, pieces, first, t, step, C
):
    """Step `t` of a row's list; `block` is the first it needs."""
    PANELS: gl.constexpr = C.DQ // _PANEL
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage = step % C.STAGES
    mbarrier.wait(k_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
    for p in gl.static_range(C.PIECES):
        turn = _turn(pieces, first, t, p, C)
        if p > 0:
            block = gl.load(index_ptr + list_at + turn // C.K_SPLIT)
        start = _start(block, pieces, turn, C)
        starts.index(stage * C.PIECES + p).store(gl.full([1], 0, gl.int32, one) + start)
        at = stage * PANELS * C.PIECES + p
        _copy(k_source, b, h_key, start, k_full.index(stage), k_pieces, at, C.PIECES, PANELS)
    mbarrier.expect(k_full.index(stage), C.BLOCK_N * C.DQ * 2)  # last: it also hands over `starts`


@gluon.jit
def _load_keys(C, sources, pointers, bars, bufs, strides, sizes):
    """Takes tiles from the queue, and loads their queries and keys.

    What it reads, it reads ahead, so that nobody waits for a list: a block one step before its keys are loaded, a tile's
    counts and its place in the queue while the tile before is loaded.
    """
    q_source, k_source = sources[0], sources[1]
    full_count_ptr, partial_count_ptr, index_ptr, queue_ptr = pointers[0], pointers[1], pointers[2], pointers[5]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_pieces, k_pieces, words, starts = bufs[0], bufs[1], bufs[4], bufs[5]
    count_strides, index_strides = strides[0], strides[1]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    PANELS: gl.constexpr = C.DQ // _PANEL
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = gl.program_id(0)
    full, partial = _counts(
        tile, full_count_ptr, partial_count_ptr, count_strides, rows, kv_heads, group, heads_per_mask, C
    )
    word = _word(tile, tiles, full, partial)
    tile += gl.num_programs(0)
    b, h, h_key, row = _place(gl.maximum(word, 0), rows, kv_heads, group)
    pieces, steps, first, masked = _extent(word, C)
    list_at = _list_at(b, h, row, index_strides, cols, heads_per_mask, C)
    block = gl.load(index_ptr + list_at + _turn(pieces, first, 0, 0, C) // C.K_SPLIT)
    visit = 0
    step = 0
    going = word >= 0
    while going:
        # After the last tile comes an empty one, whose scores the consumers compute and drop.
        live = word >= 0
        pieces, steps, first, masked = _extent(word, C)
        known = gl.minimum(tile, tiles - 1)
        full, partial = _counts(
            known, full_count_ptr, partial_count_ptr, count_strides, rows, kv_heads, group, heads_per_mask, C
        )
        taken = gl.atomic_add(queue_ptr, 1)
        slot = visit % 2
        mbarrier.wait(q_empty.index(slot), ((visit // 2) & 1) ^ 1)
        words.index(slot).store(gl.full([1], 0, gl.int64, one) + word)
        words.index(2 + slot).store(gl.full([1], 0, gl.int64, one) + _packed(b, h, h_key, row))
        mbarrier.expect(q_full.index(slot), C.CONSUMERS * 64 * C.DQ * 2)
        for c in gl.static_range(C.CONSUMERS):
            at = (slot * C.CONSUMERS + c) * PANELS
            _copy(q_source, b, h, (row * C.CONSUMERS + c) * 64, q_full.index(slot), q_pieces, at, 1, PANELS)
        second = gl.load(index_ptr + list_at + _turn(pieces, first, 1, 0, C) // C.K_SPLIT)
        _copy_keys(
            k_source, index_ptr, k_pieces, k_full, k_empty, starts, block, list_at, b, h_key, pieces, first, 0,
            step, C,
        )  # fmt: skip
        step += 1
        following = _word(tile, tiles, full, partial)
        next_b, next_h, next_key, next_row = _place(known, rows, kv_heads, group)
        next_at = _list_at(next_b, next_h, next_row, index_strides, cols, heads_per_mask, C)
        next_pieces, next_steps, next_first, next_masked = _extent(following, C)
        opening = gl.load(index_ptr + next_at + gl.maximum(next_pieces - 1, 0) // C.K_SPLIT)
        block = second
        for t in range(1, steps):
            later = gl.load(index_ptr + list_at + _turn(pieces, first, t + 1, 0, C) // C.K_SPLIT)
            _copy_keys(
                k_source, index_ptr, k_pieces, k_full, k_empty, starts, block, list_at, b, h_key, pieces, first, t,
                step, C,
            )  # fmt: skip
            step += 1
            block = later
        block = opening
        b, h, h_key, row, list_at = next_b, next_h, next_key, next_row, next_at
        visit += 1
        going = live
        word = gl.where(live, following, -1)
        tile = taken + 2 * gl.num_programs(0)


@gluon.jit
def _read(words, slot, NUM_WARPS: gl.constexpr):
    return gl.max(words.index(slot).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@gluon.jit
def _load_values(C, sources, pointers, bars, bufs, strides, sizes):
    """Follows the tiles that `_load_keys` takes, and loads their values."""
    v_source, index_ptr, index_strides = sources[2], pointers[2], strides[1]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    v_pieces, words = bufs[2], bufs[4]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    PANELS: gl.constexpr = C.DV // _PANEL
    visit = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    word = _read(words, 0, 1)
    while word >= 0:
        b, h, h_key, row = _unpacked(_read(words, 2 + visit % 2, 1))
        mbarrier.arrive(q_empty.index(visit % 2), count=1)
        pieces, steps, first, masked = _extent(word, C)
        list_at = _list_at(b, h, row, index_strides, cols, heads_per_mask, C)
        for t in range(steps):
            stage = step % C.STAGES
            block = gl.load(index_ptr + list_at + _turn(pieces, first, t, 0, C) // C.K_SPLIT)
            mbarrier.wait(v_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), C.BLOCK_N * C.DV * 2)
            for p in gl.static_range(C.PIECES):
                turn = _turn(pieces, first, t, p, C)
                if p > 0:
                    block = gl.load(index_ptr + list_at + turn // C.K_SPLIT)
                start = _start(block, pieces, turn, C)
                at = stage * PANELS * C.PIECES + p
                _copy(v_source, b, h_key, start, v_full.index(stage), v_pieces, at, C.PIECES, PANELS)
            step += 1
        visit += 1
        mbarrier.wait(q_full.index(visit % 2), (visit // 2) & 1)
        word = _read(words, visit % 2, 1)


@gluon.jit
def _row_max(scores, LAYOUT: gl.constexpr):
    """Maximum of each row. In two steps, so that a thread runs two chains of comparisons a row instead of one."""
    by_eight = scores.reshape([scores.shape[0], scores.shape[1] // 8, 8])
    return gl.convert_layout(gl.max(gl.max(by_eight, 1), 1), LAYOUT)


@gluon.jit
def _partial_sum(weight):
    """Row sums as far as a thread holds them; a tile's end adds the rest."""
    return gl.sum(weight.reshape([weight.shape[0], weight.shape[1] // 8, 8]), 1)


@gluon.jit
def _query_positions(q_position_ptr, strides, b, h, row, offset, WG: gl.constexpr, C, LAYOUT: gl.constexpr):
    """The last position that each query may see."""
    place = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=LAYOUT)
    if not C.CAUSAL:
        last = gl.full([64], _NEVER - 1, gl.int32, LAYOUT)
    elif C.Q_IN_ORDER:
        last = place + offset
    else:
        last = gl.load(q_position_ptr + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1] + place)
    return last


@gluon.jit
def _masked(scores, last, starts, stage, valid, k_position_ptr, position_at, N, C):
    """-inf where a slot holds no key, or one after the last that the query may see."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    PIECE: gl.constexpr = scores.shape[1] // C.PIECES
    column = gl.arange(0, scores.shape[1], layout=LAYOUT)
    for p in gl.static_range(C.PIECES):
        start = _read(starts, stage * C.PIECES + p, 4)
        if C.K_IN_ORDER:
            limit = (last if C.CAUSAL else gl.minimum(last, N - 1)) - start
            position = column - p * PIECE
        else:
            limit = last
            position = gl.load(k_position_ptr + position_at + start + column % PIECE)
            position = gl.where(position >= 0, position, _NEVER)
        limit = gl.where(p < valid, limit, -1)
        allowed = position[None, :] <= limit[:, None]
        if C.PIECES > 1:
            allowed = allowed | (column // PIECE != p)[None, :]
        scores = gl.where(allowed, scores, float("-inf"))
    return scores


@gluon.jit
def _consume(WG: gl.constexpr, C, sources, pointers, bars, bufs, strides, sizes):
    """The softmax of 64 queries of each tile, and its products."""
    out_target = sources[3]
    q_position_ptr, k_position_ptr, lse_ptr = pointers[3], pointers[4], pointers[6]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_pieces, k_pieces, v_pieces, out_pieces, words, starts = bufs
    q_position_strides, k_position_strides, lse_strides = strides[2], strides[3], strides[4]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    HALF: gl.constexpr = q_pieces.dtype
    PANELS: gl.constexpr = C.DV // _PANEL
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.DV, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    q_bufs = q_pieces._reinterpret(HALF, [2 * C.CONSUMERS, 64, C.DQ], SHARED)
    k_bufs = k_pieces._reinterpret(HALF, [C.STAGES, C.BLOCK_N, C.DQ], SHARED)
    v_bufs = v_pieces._reinterpret(HALF, [C.STAGES, C.BLOCK_N, C.DV], SHARED)
    out_bufs = out_pieces._reinterpret(HALF, [C.CONSUMERS, 64, C.DV], SHARED)
    none = gl.zeros([64, C.BLOCK_N], gl.float32, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, _partial_sum(none).type.layout)

    # The scores of the very first keys.
    mbarrier.wait(q_full.index(0), 0)
    word = _read(words, 0, 4)
    b, h, h_key, row = _unpacked(_read(words, 2, 4))
    pieces, steps, first, masked = _extent(word, C)
    last = _query_positions(q_position_ptr, q_position_strides, b, h, row, offset, WG, C, ROW)
    position_at = b.to(gl.int64) * k_position_strides[0] + h_key.to(gl.int64) * k_position_strides[1]
    mbarrier.wait(k_full.index(0), 0)
    q = q_bufs.index(WG)
    scores_token = warpgroup_mma(q, k_bufs.index(0).permute([1, 0]), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores_token])
    scores = _masked(scores, last, starts, 0, first, k_position_ptr, position_at, N, C)
    mbarrier.arrive(k_empty.index(0), count=1)
    highest = gl.maximum(_row_max(scores, ROW) * scale, _LOWEST)
    weight = gl.exp2(scores * scale - highest[:, None])
    total = _partial_sum(weight)
    operand = gl.convert_layout(weight.to(HALF), WEIGHT)
    step = 0
    visit = 0
    while word >= 0:
        pieces, steps, first, masked = _extent(word, C)
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        sums = gl.zeros([64, C.DV], gl.float32, SUMS)
        for t in range(1, steps):
            v_stage = step % C.STAGES
            v_phase = (step // C.STAGES) & 1
            step += 1
            stage = step % C.STAGES
            mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
            scores_token = warpgroup_mma(
                q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(v_stage), v_phase)
            sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
            scores = warpgroup_mma_wait(1, [scores_token])
            if t < masked:
                scores = _masked(scores, last, starts, stage, C.PIECES, k_position_ptr, position_at, N, C)
            mbarrier.arrive(k_empty.index(stage), count=1)
            new = gl.maximum(highest, _row_max(scores, ROW) * scale)
            weight = gl.exp2(scores * scale - new[:, None])
            rescale = gl.exp2(highest - new)
            highest = new
            total = total * gl.convert_layout(rescale, SUM_ROW)[:, None] + _partial_sum(weight)
            sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            operand = gl.convert_layout(weight.to(HALF), WEIGHT)
            sums = sums * gl.convert_layout(rescale, OUT_ROW)[:, None]

        # The border: the first scores of the next tile beside the last values of this one.
        v_stage = step % C.STAGES
        v_phase = (step // C.STAGES) & 1
        step += 1
        stage = step % C.STAGES
        mbarrier.arrive(q_empty.index(visit % 2), count=1)
        visit += 1
        mbarrier.wait(q_full.index(visit % 2), (visit // 2) & 1)
        word = _read(words, visit % 2, 4)
        place = _read(words, 2 + visit % 2, 4)
        mbarrier.wait(k_full.index(stage), (step // C.STAGES) & 1)
        q = q_bufs.index((visit % 2) * C.CONSUMERS + WG)
        scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
        next_b, next_h, next_key, next_row = _unpacked(place)
        pieces, steps, first, masked = _extent(word, C)
        last = _query_positions(
            q_position_ptr, q_position_strides, next_b, next_h, next_row, offset, WG, C, ROW,
        )  # fmt: skip
        position_at = next_b.to(gl.int64) * k_position_strides[0] + next_key.to(gl.int64) * k_position_strides[1]
        whole = gl.convert_layout(gl.sum(total, 1), ROW)
        log_sum = (highest + gl.log2(whole)) * 0.6931471805599453  # ln 2: scores are in base 2
        log_sum = gl.where(whole == 0.0, float("-inf"), log_sum)
        query = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=ROW)
        lse_at = b.to(gl.int64) * lse_strides[0] + h.to(gl.int64) * lse_strides[1]
        gl.store(lse_ptr + lse_at + query, log_sum, mask=query < M)
        scores = warpgroup_mma_wait(1, [scores_token])
        scores = _masked(scores, last, starts, stage, first, k_position_ptr, position_at, N, C)
        mbarrier.arrive(k_empty.index(stage), count=1)
        highest = gl.maximum(_row_max(scores, ROW) * scale, _LOWEST)
        weight = gl.exp2(scores * scale - highest[:, None])
        total = _partial_sum(weight)
        sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        operand = gl.convert_layout(weight.to(HALF), WEIGHT)
        inverse = gl.where(whole == 0.0, 0.0, 1.0 / whole)
        result = (sums * gl.convert_layout(inverse, OUT_ROW)[:, None]).to(HALF)
        tma.store_wait(0)
        out_bufs.index(WG).store(result)
        fence_async_shared()
        for panel in gl.static_range(PANELS):
            tma.async_copy_shared_to_global(
                out_target, [b, h, (row * C.CONSUMERS + WG) * 64, panel * _PANEL],
                out_pieces.index(WG * PANELS + panel),
            )  # fmt: skip
        b, h, row = next_b, next_h, next_row
    tma.store_wait(0)


@gluon.jit
def _barriers(N: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _kernel(
    q_source, k_source, v_source, out_target, lse_ptr,
    full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr,
    count_strides, index_strides, q_position_strides, k_position_strides, lse_strides,
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2,
    DQ: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, K_SPLIT: gl.constexpr, Q_SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, Q_IN_ORDER: gl.constexpr, K_IN_ORDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    PANEL_ROWS: gl.constexpr = BLOCK_N // PIECES
    HALF: gl.constexpr = q_source.dtype
    Q_PANELS: gl.constexpr = DQ // _PANEL
    V_PANELS: gl.constexpr = DV // _PANEL
    q_pieces = gl.allocate_shared_memory(HALF, [2 * CONSUMERS * Q_PANELS, 1, 1, 64, _PANEL], q_source.layout)
    k_pieces = gl.allocate_shared_memory(
        HALF, [STAGES * Q_PANELS * PIECES, 1, 1, PANEL_ROWS, _PANEL], k_source.layout
    )
    v_pieces = gl.allocate_shared_memory(
        HALF, [STAGES * V_PANELS * PIECES, 1, 1, PANEL_ROWS, _PANEL], v_source.layout
    )
    out_pieces = gl.allocate_shared_memory(HALF, [CONSUMERS * V_PANELS, 1, 1, 64, _PANEL], out_target.layout)
    words = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int32, [STAGES * PIECES, 1], mbarrier.MBarrierLayout())
    q_full = _barriers(2, 1)
    q_empty = _barriers(2, CONSUMERS + 1)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, CONSUMERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, CONSUMERS)
    fence_async_shared()
    sources = (q_source, k_source, v_source, out_target)
    pointers = (full_count_ptr, partial_count_ptr, index_ptr, q_position_ptr, k_position_ptr, queue_ptr, lse_ptr)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    bufs = (q_pieces, k_pieces, v_pieces, out_pieces, words, starts)
    strides = (count_strides, index_strides, q_position_strides, k_position_strides, lse_strides)
    sizes = (tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale_log2)
    C = _Constants(DQ, DV, CONSUMERS, BLOCK_N, STAGES, PIECES, K_SPLIT, Q_SPLIT, CAUSAL, Q_IN_ORDER, K_IN_ORDER)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (first, C, sources, pointers, bars, bufs, strides, sizes)),
            (_consume, (second, C, sources, pointers, bars, bufs, strides, sizes)),
            (_load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (_load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (first, C, sources, pointers, bars, bufs, strides, sizes)),
            (_load_keys, (C, sources, pointers, bars, bufs, strides, sizes)),
            (_load_values, (C, sources, pointers, bars, bufs, strides, sizes)),
        ], [1, 1], [_LOADER_REGISTERS, _LOADER_REGISTERS])  # fmt: skip

"""The two warps that load for the kernels on Hopper through the bulk copy engine (TMA).

One warp takes work items from the scheduler and loads queries and keys (`load_keys`), the other loads values
(`load_values`). `hopper/tile_scheduler.py` explains the terms, the work items, and the barriers of the buffers.

8-bit keys and values are stored twice. Heads 0 to Hk - 1 are read for tiles of keys that every query sees whole, heads Hk to
2 Hk - 1 for masked ones. Values in fp8 are stored transposed. The scales of keys and values are loaded together with the
keys, and counted by the same full barrier.
"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.nn.functional import pad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blocksparse.kernels.common.names_triton import bulk_load, thread_barrier
from blocksparse.kernels.common.sizes import padded_keys, padded_values
from blocksparse.kernels.hopper.tile_scheduler import (
    counts_of,
    first_block,
    list_extent,
    pack_coords,
    pack_item,
    read,
    tile_coords,
    unpack_coords,
)

# fp32 numbers that are copied for a piece's scales, of which four are used: a bulk copy must land at a multiple of 128
# bytes of shared memory, and 32 numbers fill them.
TILE_NUMBERS = gl.constexpr(32)
# Steps before the end of a tile of queries, when the next one is taken from the scheduler.
TAKEN_AHEAD = gl.constexpr(3)
BOX_COLS = gl.constexpr(64)  # columns of a TMA box of 16-bit numbers: 128 bytes, the widest swizzle


def tma_boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of boxes of `rows` rows of `x` `[B, H, N, D]`: 64 columns, or all where a number is a byte."""
    eight = x.element_size() == 1
    wide = padded_keys(x.shape[-1]) if eight else BOX_COLS.value
    layout = _layout(wide, 8, 4) if eight else _layout(128, 16, 4)
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, wide], layout)


def transposed_boxes(v: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of boxes of `keys` keys, with all their channels, of transposed values `v` `[B, H, D, N]`."""
    box = [1, 1, padded_values(v.shape[2]), keys]
    return TensorDescriptor(v, v.shape, v.stride(), box, _layout(keys, 8, 4))


def tma_numbers(x: Tensor, n: int) -> TensorDescriptor:
    """A descriptor of `n` consecutive numbers of `x` `[B, H, N]` fp32."""
    if x.shape[-1] % 4:  # the copy engine wants every row to begin at a multiple of 16 bytes
        x = pad(x, (0, -x.shape[-1] % 4))
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, n], _layout(0, 32, 3))


@functools.cache
def _layout(swizzled_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """A layout in shared memory, made once: making one takes the host longer than all else about a descriptor."""
    return gl.NVMMASharedLayout(swizzled_bytes, bits, rank=rank)


@gluon.constexpr_function
def box_cols(D, EIGHT):
    """Columns of a TMA box: all `D` where a number is one byte, else 64."""
    return D if EIGHT else 64


@gluon.jit
def _list_at(b, h, row, given, C):
    """The offset in `lists` at which a row's list begins."""
    strides = given.strides.lists
    at = b.to(gl.int64) * strides[0] + (h // given.sizes.heads_per_mask).to(gl.int64) * strides[1]
    return at + (row // C.Q_SPLIT).to(gl.int64) * given.sizes.cols


@gluon.jit
def _piece_number(pieces, first, t, p, C):
    """Which piece of a row's list, counted from its front, is piece `p` of step `t`: the list is walked from its end.

    Step 0 has `first` pieces, every later one `PIECES`; what step 0 loads beyond its `first` pieces is masked. Before the
    list's front the answer is piece 0, of which nothing is used.
    """
    before = gl.where(t == 0, 0, first + (t - 1) * C.PIECES)
    return gl.maximum(pieces - 1 - before - p, 0)


@gluon.jit
def _start(block, pieces, number, C):
    """The first slot of piece `number` of a list, which lies in `block`; slot 0 where the list is empty."""
    # Lists may be int16. A block is widened here and not where it is loaded, since blocks are loaded a step ahead, and
    # a conversion there would wait for the load.
    return gl.where(pieces > 0, block.to(gl.int32) * C.K_SPLIT + number % C.K_SPLIT, 0) * (C.BLOCK_N // C.PIECES)


@gluon.jit
def _copy(desc, b, h, start, barrier, pieces, at, STRIDE: gl.constexpr, BOXES: gl.constexpr, COLS: gl.constexpr):
    """Starts to copy rows from `start` on, box by box, into `pieces[at]`, `pieces[at + STRIDE]` and so on."""
    for box in gl.static_range(BOXES):
        bulk_load(desc, [b, h, start, box * COLS], barrier, pieces.index(at + box * STRIDE))


@gluon.jit
def _copy_numbers(desc, b, h, start, barrier, memory):
    """Starts to copy the fp32 numbers from `start` on of one head."""
    bulk_load(desc, [b, h, start], barrier, memory)


@gluon.jit
def _copy_scales(given, b, h_key, start, barrier, at, by_token, C):
    """Starts to copy the scales of a piece of 8-bit keys and values: one per token if `by_token`, else four per piece."""
    COUNT: gl.constexpr = C.STAGES * C.PIECES
    descriptors, of_tokens, of_tiles = given.descriptors, given.buffers.token_numbers, given.buffers.tile_numbers
    if by_token:
        _copy_numbers(descriptors.k_token, b, h_key, start, barrier, of_tokens.index(at))
        if C.PV8:
            for i in gl.static_range(2):  # the logarithms of the scales, then their inverses
                to = of_tokens.index((1 + i) * COUNT + at)
                _copy_numbers(descriptors.v_token, b, h_key + i * given.sizes.kv_heads, start, barrier, to)
    else:
        first = start // (C.BLOCK_N // C.PIECES // 4)  # four numbers for each piece
        _copy_numbers(descriptors.k_tile, b, h_key, first, barrier, of_tiles.index(at))
        if C.PV8:
            _copy_numbers(descriptors.v_tile, b, h_key, first, barrier, of_tiles.index(COUNT + at))


@gluon.jit
def _copy_keys(given, block, list_at, b, h_key, pieces, first, masked, t, step, C):
    """Waits for the stage of `step`, and starts to load the keys of step `t` of a list, whose first piece is in `block`."""
    COLS: gl.constexpr = box_cols(C.DQ, C.QK8)
    BOXES: gl.constexpr = C.DQ // COLS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    k_full, k_empty, starts = given.barriers.k_full, given.barriers.k_empty, given.buffers.starts
    stage = step % C.STAGES
    mbarrier.wait(k_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
    h_copy = h_key
    if C.QK8:  # a masked step reads the copy of the keys with a scale per token
        h_copy = h_key + gl.where(t < masked, given.sizes.kv_heads, 0)
    for p in gl.static_range(C.PIECES):
        number = _piece_number(pieces, first, t, p, C)
        if p > 0:
            block = gl.load(given.pointers.lists + list_at + number // C.K_SPLIT)
        start = _start(block, pieces, number, C)
        starts.index(stage * C.PIECES + p).store(gl.full([1], 0, gl.int32, one) + start)
        at = stage * BOXES * C.PIECES + p
        _copy(
            given.descriptors.k, b, h_copy, start, k_full.index(stage), given.buffers.k, at, C.PIECES, BOXES, COLS
        )
        if C.QK8:
            at = stage * C.PIECES + p
            _copy_scales(given, b, h_key, start, k_full.index(stage), at, t < masked, C)
    # This arrival comes last, for it also hands over `starts`. One lane arrives for the warp, so all of them must have
    # stored. Copies that finish before it do no harm: without the arrival the phase cannot end.
    thread_barrier()
    BYTES: gl.constexpr = C.BLOCK_N * C.DQ * (1 if C.QK8 else 2)
    if not C.QK8:
        mbarrier.expect(k_full.index(stage), BYTES)
    elif t < masked:
        mbarrier.expect(k_full.index(stage), BYTES + C.BLOCK_N * (12 if C.PV8 else 4))
    else:
        mbarrier.expect(k_full.index(stage), BYTES + C.PIECES * TILE_NUMBERS * (8 if C.PV8 else 4))


@gluon.jit
def _copy_steps(given, block, list_at, b, h_key, pieces, first, masked, begin, end, step, C):
    """`_copy_keys` of the steps from `begin` up to `end`; returns the block of step `end`, and the count of all steps."""
    for t in range(begin, end):
        later = gl.load(given.pointers.lists + list_at + _piece_number(pieces, first, t + 1, 0, C) // C.K_SPLIT)
        _copy_keys(given, block, list_at, b, h_key, pieces, first, masked, t, step, C)
        step += 1
        block = later
    return block, step


@gluon.jit
def _copy_queries(given, item, b, h, h_key, row, split_slot, visit, C):
    """Waits for the next buffer of queries and starts to load a tile of queries, with its work item and coordinates."""
    COLS: gl.constexpr = box_cols(C.DQ, C.QK8)
    BOXES: gl.constexpr = C.DQ // COLS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q_full, q_empty, items = given.barriers.q_full, given.barriers.q_empty, given.buffers.items
    buffer = visit % C.Q_BUFFERS
    mbarrier.wait(q_empty.index(buffer), ((visit // C.Q_BUFFERS) & 1) ^ 1)
    items.index(buffer).store(gl.full([1], 0, gl.int64, one) + item)
    items.index(C.Q_BUFFERS + buffer).store(gl.full([1], 0, gl.int64, one) + pack_coords(b, h, h_key, row))
    if C.SPLIT_KV:
        items.index(2 * C.Q_BUFFERS + buffer).store(gl.full([1], 0, gl.int64, one) + split_slot)
    thread_barrier()  # one lane arrives for all that stored
    mbarrier.expect(q_full.index(buffer), C.CONSUMERS * 64 * (C.DQ + 8 if C.QK8 else 2 * C.DQ))
    if C.QK8:
        of_queries = given.descriptors.q_scale, given.descriptors.taken
        for i in gl.static_range(2):
            to = given.buffers.query_numbers.index(2 * i + buffer)
            _copy_numbers(of_queries[i], b, h, row * (C.CONSUMERS * 64), q_full.index(buffer), to)
    for c in gl.static_range(C.CONSUMERS):
        at = (buffer * C.CONSUMERS + c) * BOXES
        _copy(
            given.descriptors.q, b, h, (row * C.CONSUMERS + c) * 64, q_full.index(buffer), given.buffers.q, at, 1, BOXES, COLS,
        )  # fmt: skip


@gluon.jit
def _work(tile, given, C):
    """The work that the scheduler's number `tile` stands for: a tile of queries, or with `SPLIT_KV` an entry of a work list.

    Returns the work item, which is -1 after the last number, then its batch entry, query head, KV head and row. Then come
    where its list, or its split of one, begins, and the split slot (`hopper/split_kv.py`).
    """
    work_ptr, sizes, tiles = given.pointers.work, given.sizes, given.sizes.tiles
    known = gl.minimum(tile, tiles - 1)
    split_slot = -1
    if C.SPLIT_KV:
        item = gl.where(tile < tiles, gl.load(work_ptr + known), -1)
        b, h, h_key, row = unpack_coords(gl.load(work_ptr + tiles + known))
        split_slot = gl.load(work_ptr + 2 * tiles + known)
    else:
        full, partial = counts_of(known, given, C)
        item = pack_item(tile, tiles, full, partial)
        b, h, h_key, row = tile_coords(known, sizes.rows, sizes.kv_heads, sizes.group)
    list_at = _list_at(b, h, row, given, C) + first_block(item, C)
    return item, b, h, h_key, row, list_at, split_slot


@gluon.jit
def load_keys(C, given):
    """Takes tiles of queries from the scheduler, and loads their queries and keys.

    A program's first tile of queries is its own number. Every later one comes from a counter in global memory, and is taken
    `TAKEN_AHEAD` steps before the last keys of the tile before it are loaded. This warp then waits for the answer and for
    the tile's counts, while consumers compute the keys that are in their stages already. It takes no tile earlier, for one
    that waits in a program with a long list waits while other programs run out of work. Numbers are read ahead, so that
    copies need not wait for them. The first block of a step is read one step ahead; further pieces of a step read theirs
    when they need it. The counts of a tile of queries and its first block are read as soon as its number is there.

    Where there is only one buffer of queries, it becomes free with the last scores of the tile before, so that a tile's
    first keys go ahead of its queries. That cannot end in a circle of waits. Consumers wait for queries only between tiles,
    when they have given back all keys of the tile before, and so the buffer that the first keys need.
    """
    lists_ptr = given.pointers.lists
    tile = gl.program_id(0)
    item, b, h, h_key, row, list_at, split_slot = _work(tile, given, C)
    pieces, steps, first, masked = list_extent(item, C)
    block = gl.load(lists_ptr + list_at + _piece_number(pieces, first, 0, 0, C) // C.K_SPLIT)
    visit = 0
    step = 0
    # At first always true: where lists are split, even the first item may be -1, and consumers wait for it.
    going = tile >= 0
    while going:
        # After the last tile of queries comes one with the item -1 and an empty list: the consumers start its scores at
        # the border, as they would those of any tile, and drop them. No values are loaded for it.
        live = item >= 0
        pieces, steps, first, masked = list_extent(item, C)
        if C.Q_BUFFERS > 1:
            _copy_queries(given, item, b, h, h_key, row, split_slot, visit, C)
        second = gl.load(lists_ptr + list_at + _piece_number(pieces, first, 1, 0, C) // C.K_SPLIT)
        _copy_keys(given, block, list_at, b, h_key, pieces, first, masked, 0, step, C)
        if C.Q_BUFFERS == 1:
            _copy_queries(given, item, b, h, h_key, row, split_slot, visit, C)
        step += 1
        block = second
        early = gl.maximum(steps - TAKEN_AHEAD, 1)
        block, step = _copy_steps(given, block, list_at, b, h_key, pieces, first, masked, 1, early, step, C)
        tile = gl.num_programs(0) + gl.atomic_add(given.pointers.counter, 1, sem="relaxed")
        next_item, next_b, next_h, next_key, next_row, next_at, next_slot = _work(tile, given, C)
        next_pieces, next_steps, next_first, next_masked = list_extent(next_item, C)
        opening = gl.load(lists_ptr + next_at + gl.maximum(next_pieces - 1, 0) // C.K_SPLIT)
        block, step = _copy_steps(given, block, list_at, b, h_key, pieces, first, masked, early, steps, step, C)
        block = opening
        b, h, h_key, row, list_at, split_slot = next_b, next_h, next_key, next_row, next_at, next_slot
        visit += 1
        going = live
        item = gl.where(live, next_item, -1)


@gluon.jit
def load_values(C, given):
    """Loads the values of the tiles of queries that `load_keys` takes: it reads their items when their queries are there."""
    v_desc, lists_ptr = given.descriptors.v, given.pointers.lists
    v_pieces, items = given.buffers.v, given.buffers.items
    q_full, q_empty, k_full, k_empty, v_full, v_empty = given.barriers
    BOXES: gl.constexpr = C.DV // BOX_COLS
    visit = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    item = read(items, 0, 1)
    while item >= 0:
        b, h, h_key, row = unpack_coords(read(items, C.Q_BUFFERS + visit % C.Q_BUFFERS, 1))
        mbarrier.arrive(q_empty.index(visit % C.Q_BUFFERS), count=1)
        pieces, steps, first, masked = list_extent(item, C)
        list_at = _list_at(b, h, row, given, C) + first_block(item, C)
        for t in range(steps):
            stage = step % C.STAGES
            block = gl.load(lists_ptr + list_at + _piece_number(pieces, first, t, 0, C) // C.K_SPLIT)
            mbarrier.wait(v_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), C.BLOCK_N * C.DV * (1 if C.PV8 else 2))
            for p in gl.static_range(C.PIECES):
                number = _piece_number(pieces, first, t, p, C)
                if p > 0:
                    block = gl.load(lists_ptr + list_at + number // C.K_SPLIT)
                start = _start(block, pieces, number, C)
                if C.PV8:
                    h_copy = h_key + gl.where(t < masked, given.sizes.kv_heads, 0)
                    at = stage * C.PIECES + p
                    bulk_load(v_desc, [b, h_copy, 0, start], v_full.index(stage), v_pieces.index(at))
                else:
                    at = stage * BOXES * C.PIECES + p
                    _copy(v_desc, b, h_key, start, v_full.index(stage), v_pieces, at, C.PIECES, BOXES, BOX_COLS)
            step += 1
        visit += 1
        mbarrier.wait(q_full.index(visit % C.Q_BUFFERS), (visit // C.Q_BUFFERS) & 1)
        item = read(items, visit % C.Q_BUFFERS, 1)

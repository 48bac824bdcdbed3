"""The two warps that load for the kernels on Hopper through the bulk copy engine (TMA).

One warp takes work from the queue and loads queries and keys (`load_keys`), the other loads values (`load_values`).
`hopper/queue.py` explains the words that are used here, the queue's word, and the barriers of the buffers.

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
from blocksparse.kernels.hopper.queue import (
    counts_of,
    extent,
    first_block,
    packed_place,
    place_of,
    read,
    unpacked_place,
    word_of,
)

# fp32 numbers that are copied for a piece's scales, of which four are used: a bulk copy must land at a multiple of 128
# bytes of shared memory, and 32 numbers fill them.
TILE_NUMBERS = gl.constexpr(32)
# Steps before the end of a tile of queries, when the next one is taken from the queue.
TAKEN_AHEAD = gl.constexpr(3)
PANEL = gl.constexpr(64)  # columns that one bulk copy of 16-bit numbers takes: 128 bytes, the widest swizzle


def panels(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor that copies a panel of `rows` rows of `x` `[B, H, N, D]`: 64 columns, or all where a number is a byte."""
    eight = x.element_size() == 1
    wide = padded_keys(x.shape[-1]) if eight else PANEL.value
    layout = _layout(wide, 8, 4) if eight else _layout(128, 16, 4)
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, wide], layout)


def turned(v: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor that copies `keys` keys, with all their channels, of transposed values `v` `[B, H, D, N]`."""
    box = [1, 1, padded_values(v.shape[2]), keys]
    return TensorDescriptor(v, v.shape, v.stride(), box, _layout(keys, 8, 4))


def numbers(x: Tensor, n: int) -> TensorDescriptor:
    """A descriptor that copies `n` consecutive numbers of `x` `[B, H, N]` fp32."""
    if x.shape[-1] % 4:  # the copy engine wants every row to begin at a multiple of 16 bytes
        x = pad(x, (0, -x.shape[-1] % 4))
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, n], _layout(0, 32, 3))


@functools.cache
def _layout(swizzled_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """A layout in shared memory, made once: making one takes the host longer than all else about a descriptor."""
    return gl.NVMMASharedLayout(swizzled_bytes, bits, rank=rank)


@gluon.constexpr_function
def panel_of(D, EIGHT):
    """Columns that one bulk copy takes: all `D` where a number is one byte, else a panel."""
    return D if EIGHT else 64


@gluon.jit
def _list_at(b, h, row, index_strides, cols, heads_per_mask, C):
    """The offset in `index` at which a row's list begins."""
    at = b.to(gl.int64) * index_strides[0] + (h // heads_per_mask).to(gl.int64) * index_strides[1]
    return at + (row // C.Q_SPLIT).to(gl.int64) * cols


@gluon.jit
def _turn(pieces, first, t, p, C):
    """Which piece of a row's list, counted from its front, is piece `p` of step `t`: the list is walked from its end.

    Step 0 has `first` pieces, every later one `PIECES`; what step 0 loads beyond its `first` pieces is masked. Before the
    list's front the answer is piece 0, of which nothing is used.
    """
    before = gl.where(t == 0, 0, first + (t - 1) * C.PIECES)
    return gl.maximum(pieces - 1 - before - p, 0)


@gluon.jit
def _start(block, pieces, turn, C):
    """The first slot of piece `turn` of a list, which lies in `block`; slot 0 where the list is empty."""
    # Lists may be int16. A block is widened here and not where it is loaded, since blocks are loaded a step ahead, and
    # a conversion there would wait for the load.
    return gl.where(pieces > 0, block.to(gl.int32) * C.K_SPLIT + turn % C.K_SPLIT, 0) * (C.BLOCK_N // C.PIECES)


@gluon.jit
def _copy(
    source, b, h, start, barrier, pieces, at, STRIDE: gl.constexpr, PANELS: gl.constexpr, WIDE: gl.constexpr
):
    """Starts to copy rows from `start` on, panel by panel, into `pieces[at]`, `pieces[at + STRIDE]` and so on."""
    for panel in gl.static_range(PANELS):
        bulk_load(source, [b, h, start, panel * WIDE], barrier, pieces.index(at + panel * STRIDE))


@gluon.jit
def _copy_numbers(source, b, h, start, barrier, target):
    """Starts to copy the fp32 numbers from `start` on of one head."""
    bulk_load(source, [b, h, start], barrier, target)


@gluon.jit
def _copy_scales(sources, bufs, b, h_key, kv_heads, start, barrier, at, by_token, C):
    """Starts to copy the scales of a piece of 8-bit keys and values: one per token if `by_token`, else four per piece."""
    COUNT: gl.constexpr = C.STAGES * C.PIECES
    k_token_source, v_token_source = sources[5]
    k_tile_source, v_tile_source = sources[6]
    of_queries, of_tokens, of_tiles = bufs[6]
    if by_token:
        _copy_numbers(k_token_source, b, h_key, start, barrier, of_tokens.index(at))
        if C.PV8:
            for x in gl.static_range(2):  # the logarithms of the scales, then their inverses
                to = of_tokens.index((1 + x) * COUNT + at)
                _copy_numbers(v_token_source, b, h_key + x * kv_heads, start, barrier, to)
    else:
        first = start // (C.BLOCK_N // C.PIECES // 4)  # four numbers for each piece
        _copy_numbers(k_tile_source, b, h_key, first, barrier, of_tiles.index(at))
        if C.PV8:
            _copy_numbers(v_tile_source, b, h_key, first, barrier, of_tiles.index(COUNT + at))


@gluon.jit
def _copy_keys(
    sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads, t, step, C,
):  # fmt: skip
    """Waits for the next stage and starts to load the keys of step `t` of a row's list.

    `block` is the block of the step's first piece; `step` counts all steps of the program, and gives the stage.
    """
    WIDE: gl.constexpr = panel_of(C.DQ, C.QK8)
    PANELS: gl.constexpr = C.DQ // WIDE
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index_ptr, k_source, k_pieces, starts = pointers[2], sources[1], bufs[1], bufs[5]
    stage = step % C.STAGES
    mbarrier.wait(k_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
    h_copy = h_key
    if C.QK8:  # a masked step reads the copy of the keys with a scale per token
        h_copy = h_key + gl.where(t < masked, kv_heads, 0)
    for p in gl.static_range(C.PIECES):
        turn = _turn(pieces, first, t, p, C)
        if p > 0:
            block = gl.load(index_ptr + list_at + turn // C.K_SPLIT)
        start = _start(block, pieces, turn, C)
        starts.index(stage * C.PIECES + p).store(gl.full([1], 0, gl.int32, one) + start)
        at = stage * PANELS * C.PIECES + p
        _copy(k_source, b, h_copy, start, k_full.index(stage), k_pieces, at, C.PIECES, PANELS, WIDE)
        if C.QK8:
            at = stage * C.PIECES + p
            _copy_scales(sources, bufs, b, h_key, kv_heads, start, k_full.index(stage), at, t < masked, C)
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
def _copy_steps(
    sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads, begin, end,
    step, C,
):  # fmt: skip
    """`_copy_keys` of the steps from `begin` up to `end`; returns the block of step `end`, and the count of all steps."""
    for t in range(begin, end):
        later = gl.load(pointers[2] + list_at + _turn(pieces, first, t + 1, 0, C) // C.K_SPLIT)
        _copy_keys(
            sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads, t,
            step, C,
        )  # fmt: skip
        step += 1
        block = later
    return block, step


@gluon.jit
def _copy_queries(sources, bufs, q_full, q_empty, word, b, h, h_key, row, target, visit, C):
    """Waits for the next buffer of queries and starts to load a tile of queries, which its word and place come with."""
    WIDE: gl.constexpr = panel_of(C.DQ, C.QK8)
    PANELS: gl.constexpr = C.DQ // WIDE
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q_source, q_pieces, words = sources[0], bufs[0], bufs[4]
    slot = visit % C.Q_BUFFERS
    mbarrier.wait(q_empty.index(slot), ((visit // C.Q_BUFFERS) & 1) ^ 1)
    words.index(slot).store(gl.full([1], 0, gl.int64, one) + word)
    words.index(C.Q_BUFFERS + slot).store(gl.full([1], 0, gl.int64, one) + packed_place(b, h, h_key, row))
    if C.CUT:
        words.index(2 * C.Q_BUFFERS + slot).store(gl.full([1], 0, gl.int64, one) + target)
    thread_barrier()  # one lane arrives for all that stored
    mbarrier.expect(q_full.index(slot), C.CONSUMERS * 64 * (C.DQ + 8 if C.QK8 else 2 * C.DQ))
    if C.QK8:
        of_queries, of_tokens, of_tiles = bufs[6]
        for x in gl.static_range(2):  # the queries' scales, then what smoothing takes from their logits
            to = of_queries.index(2 * x + slot)
            _copy_numbers(sources[4][x], b, h, row * (C.CONSUMERS * 64), q_full.index(slot), to)
    for c in gl.static_range(C.CONSUMERS):
        at = (slot * C.CONSUMERS + c) * PANELS
        _copy(q_source, b, h, (row * C.CONSUMERS + c) * 64, q_full.index(slot), q_pieces, at, 1, PANELS, WIDE)


@gluon.jit
def _work(tile, pointers, count_strides, index_strides, sizes, C):
    """The work that the queue's number `tile` stands for: a tile of queries, or with `CUT` an entry of a list of work.

    Returns its word, which is -1 after the last number, then its batch entry, query head, KV head and row. Then come where
    its list, or its share of one, begins, and the target of a share (`hopper/shares.py`).
    """
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    known = gl.minimum(tile, tiles - 1)
    target = -1
    if C.CUT:
        work_ptr = pointers[7]
        word = gl.where(tile < tiles, gl.load(work_ptr + known), -1)
        b, h, h_key, row = unpacked_place(gl.load(work_ptr + tiles + known))
        target = gl.load(work_ptr + 2 * tiles + known)
    else:
        full, partial = counts_of(
            known, pointers[0], pointers[1], count_strides, rows, kv_heads, group, heads_per_mask, C
        )
        word = word_of(tile, tiles, full, partial)
        b, h, h_key, row = place_of(known, rows, kv_heads, group)
    list_at = _list_at(b, h, row, index_strides, cols, heads_per_mask, C) + first_block(word, C)
    return word, b, h, h_key, row, list_at, target


@gluon.jit
def load_keys(C, sources, pointers, bars, bufs, strides, sizes):
    """Takes tiles of queries from the queue, and loads their queries and keys.

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
    index_ptr, queue_ptr = pointers[2], pointers[5]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    count_strides, index_strides = strides[0], strides[1]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    tile = gl.program_id(0)
    word, b, h, h_key, row, list_at, target = _work(tile, pointers, count_strides, index_strides, sizes, C)
    pieces, steps, first, masked = extent(word, C)
    block = gl.load(index_ptr + list_at + _turn(pieces, first, 0, 0, C) // C.K_SPLIT)
    visit = 0
    step = 0
    # At first always true: where lists are cut, even the first word may be -1, and consumers wait for it.
    going = tile >= 0
    while going:
        # After the last tile of queries comes one with the word -1 and an empty list: the consumers start its scores at
        # the border, as they would those of any tile, and drop them. No values are loaded for it.
        live = word >= 0
        pieces, steps, first, masked = extent(word, C)
        if C.Q_BUFFERS > 1:
            _copy_queries(sources, bufs, q_full, q_empty, word, b, h, h_key, row, target, visit, C)
        second = gl.load(index_ptr + list_at + _turn(pieces, first, 1, 0, C) // C.K_SPLIT)
        _copy_keys(
            sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads, 0,
            step, C,
        )  # fmt: skip
        if C.Q_BUFFERS == 1:
            _copy_queries(sources, bufs, q_full, q_empty, word, b, h, h_key, row, target, visit, C)
        step += 1
        block = second
        early = gl.maximum(steps - TAKEN_AHEAD, 1)
        block, step = _copy_steps(
            sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads, 1,
            early, step, C,
        )  # fmt: skip
        tile = gl.num_programs(0) + gl.atomic_add(queue_ptr, 1, sem="relaxed")
        following, next_b, next_h, next_key, next_row, next_at, next_target = _work(
            tile, pointers, count_strides, index_strides, sizes, C
        )
        next_pieces, next_steps, next_first, next_masked = extent(following, C)
        opening = gl.load(index_ptr + next_at + gl.maximum(next_pieces - 1, 0) // C.K_SPLIT)
        block, step = _copy_steps(
            sources, pointers, bufs, k_full, k_empty, block, list_at, b, h_key, pieces, first, masked, kv_heads,
            early, steps, step, C,
        )  # fmt: skip
        block = opening
        b, h, h_key, row, list_at, target = next_b, next_h, next_key, next_row, next_at, next_target
        visit += 1
        going = live
        word = gl.where(live, following, -1)


@gluon.jit
def load_values(C, sources, pointers, bars, bufs, strides, sizes):
    """Loads the values of the tiles of queries that `load_keys` takes: it reads their words when their queries are there."""
    v_source, index_ptr, index_strides = sources[2], pointers[2], strides[1]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    v_pieces, words = bufs[2], bufs[4]
    tiles, M, N, cols, rows, kv_heads, group, heads_per_mask, offset, scale = sizes
    PANELS: gl.constexpr = C.DV // PANEL
    visit = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    word = read(words, 0, 1)
    while word >= 0:
        b, h, h_key, row = unpacked_place(read(words, C.Q_BUFFERS + visit % C.Q_BUFFERS, 1))
        mbarrier.arrive(q_empty.index(visit % C.Q_BUFFERS), count=1)
        pieces, steps, first, masked = extent(word, C)
        list_at = _list_at(b, h, row, index_strides, cols, heads_per_mask, C) + first_block(word, C)
        for t in range(steps):
            stage = step % C.STAGES
            block = gl.load(index_ptr + list_at + _turn(pieces, first, t, 0, C) // C.K_SPLIT)
            mbarrier.wait(v_empty.index(stage), ((step // C.STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), C.BLOCK_N * C.DV * (1 if C.PV8 else 2))
            for p in gl.static_range(C.PIECES):
                turn = _turn(pieces, first, t, p, C)
                if p > 0:
                    block = gl.load(index_ptr + list_at + turn // C.K_SPLIT)
                start = _start(block, pieces, turn, C)
                if C.PV8:
                    h_copy = h_key + gl.where(t < masked, kv_heads, 0)
                    at = stage * C.PIECES + p
                    bulk_load(v_source, [b, h_copy, 0, start], v_full.index(stage), v_pieces.index(at))
                else:
                    at = stage * PANELS * C.PIECES + p
                    _copy(v_source, b, h_key, start, v_full.index(stage), v_pieces, at, C.PIECES, PANELS, PANEL)
            step += 1
        visit += 1
        mbarrier.wait(q_full.index(visit % C.Q_BUFFERS), (visit // C.Q_BUFFERS) & 1)
        word = read(words, visit % C.Q_BUFFERS, 1)

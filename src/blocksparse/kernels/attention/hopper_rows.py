"""Rows of scores in the registers of a consumer on Hopper: which keys are allowed, maxima and sums.

A thread holds two rows of a tile of scores, and of each of them the keys `8 j + 2 t` and `8 j + 2 t + 1`, four threads
`t` a row. So a tile `[64, n]` is `[64, n / 8, 4, 2]` (`by_thread`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.attention.hopper_queue import read

NEVER = gl.constexpr(2**31 - 1)
LOWEST = gl.constexpr(-1.0e30)  # of a row's maximum: where nothing is allowed, weights come to 0


@gluon.jit
def by_thread(x):
    """`[64, n]` as `[64, n / 8, 4, 2]`: the third axis runs over the four threads that share a row."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def beside(x, tile):
    """`[64, 4]`, one for each row and thread, so that it meets `tile`, a `by_thread`."""
    LAYOUT: gl.constexpr = tile.type.layout
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(x, THREAD, assert_trivial=True), 1), 3)


@gluon.jit
def of_threads(x, THREAD: gl.constexpr):
    """`[64]` as `[64, 4]` of equal numbers."""
    return gl.convert_layout(x, gl.SliceLayout(1, THREAD))[:, None] + gl.zeros([64, 4], x.dtype, THREAD)


@gluon.jit
def row_max(scores, LAYOUT: gl.constexpr):
    """Maximum of each row. In two steps, so that a thread runs two chains of comparisons a row instead of one."""
    by_eight = scores.reshape([scores.shape[0], scores.shape[1] // 8, 8])
    return gl.convert_layout(gl.max(gl.max(by_eight, 1), 1), LAYOUT)


@gluon.jit
def partial_sum(weight):
    """Row sums as far as a thread holds them; a tile's end adds the rest."""
    return gl.sum(weight.reshape([weight.shape[0], weight.shape[1] // 8, 8]), 1)


@gluon.jit
def query_positions(q_position_ptr, strides, b, h, row, offset, WG: gl.constexpr, C, LAYOUT: gl.constexpr):
    """The last position that each query may see."""
    place = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=LAYOUT)
    if not C.CAUSAL:
        last = gl.full([64], NEVER - 1, gl.int32, LAYOUT)
    elif C.Q_IN_ORDER:
        last = place + offset
    else:
        last = gl.load(q_position_ptr + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1] + place)
    return last


@gluon.constexpr_function
def _keep_asm(n):
    n = int(n)
    text = "{ .reg .b32 t; .reg .pred p; "
    for i in range(n):
        bit = 1 << (i // 4 * 2 + i % 2)
        text += f"and.b32 t, ${2 * n + i // 2 % 2 * 2}, {bit}; setp.ne.u32 p, t, 0; selp.f32 ${i}, ${i}, 0fFF800000, p; "
    return text + "}"


@gluon.constexpr_function
def _constraints(n, kind):
    n, kind = int(n), str(kind)
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [kind] * n)


@gluon.jit
def on_registers(tile, of_rows, ASM: gl.constexpr, KIND: gl.constexpr):
    """`ASM` on all numbers that a thread holds of `tile`, $0 to $n-1, in place; $2n and $2n+2 are its `of_rows`, `[64, 4]`.

    Numbers come in pairs, of the first row and of the second in turn. `KIND` is the register of `of_rows`, r or f.
    """
    LAYOUT: gl.constexpr = tile.type.layout
    N: gl.constexpr = tile.shape[1] // 2
    x = by_thread(tile)
    y = gl.inline_asm_elementwise(
        ASM, _constraints(N, KIND), [x, beside(of_rows, x)], gl.float32, is_pure=True, pack=N
    )
    return gl.convert_layout(y.reshape([tile.shape[0], tile.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def _kept(scores, bits):
    """-inf where a thread's bits, `[64, 4]` int32, the lowest of its first key, are 0: they become predicates many at a time."""
    return on_registers(scores, bits, _keep_asm(scores.shape[1] // 2), "r")


@gluon.jit
def _bits_up_to(limit, THREAD: gl.constexpr, PIECE: gl.constexpr):
    """Of a thread's keys among the first `PIECE`, bits of those whose column is at most `limit`, `[64]`."""
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, THREAD))
    left = of_threads(limit, THREAD) - 2 * thread[None, :]
    count = (left >> 3) * 2 + 1 + gl.minimum(left & 7, 1)
    count = gl.minimum(gl.where(left < 0, 0, count), PIECE // 4)
    return gl.where(count == 32, -1, (1 << (count & 31)) - 1)


@gluon.jit
def masked_scores(scores, last, starts, stage, valid, k_position_ptr, position_at, N, C):
    """-inf where a slot holds no key, or one after the last that the query may see."""
    PIECE: gl.constexpr = scores.shape[1] // C.PIECES
    if C.K_IN_ORDER:
        THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(scores).type.layout))
        bits = gl.zeros([64, 4], gl.int32, THREAD)
        for p in gl.static_range(C.PIECES):
            limit = (last if C.CAUSAL else gl.minimum(last, N - 1)) - read(starts, stage * C.PIECES + p, 4)
            limit = gl.where(p < valid, limit, -1)
            bits = bits | (_bits_up_to(limit, THREAD, PIECE) << (p * PIECE // 4))
        scores = _kept(scores, bits)
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        column = gl.arange(0, scores.shape[1], layout=LAYOUT)
        for p in gl.static_range(C.PIECES):
            start = read(starts, stage * C.PIECES + p, 4)
            position = gl.load(k_position_ptr + position_at + start + column % PIECE)
            position = gl.where(position >= 0, position, NEVER)
            allowed = position[None, :] <= gl.where(p < valid, last, -1)[:, None]
            if C.PIECES > 1:
                allowed = allowed | (column // PIECE != p)[None, :]
            scores = gl.where(allowed, scores, float("-inf"))
    return scores

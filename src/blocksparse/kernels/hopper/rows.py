"""Rows of scores in the registers of a consumer on Hopper: which keys are allowed, maxima and sums.

The matrix product of a warp group (wgmma) leaves scores `[64, n]`, of 64 queries and `n` keys, in registers. Warp `w` has
rows `16 w` to `16 w + 15`. Lane `l` of it has the rows `16 w + l // 4` and `16 w + l // 4 + 8`. Of each row lane `l` has
the columns `8 j + 2 t` and `8 j + 2 t + 1`. Here `t = l % 4`, and `j` is any number below `n / 8`. So four threads `t`
share a row, and each of them has `n / 4` keys of it. `by_thread` gives each of these indices an axis: `[64, n / 8, 4, 2]`
is row, `j`, `t` and which of the two. A number for each row and thread, such as a partial sum, is `[64, 4]`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.hopper.tile_scheduler import read

NEVER = gl.constexpr(2**31 - 1)  # the position of an empty slot: later than any query's
# A row's first maximum: the least fp32 number, so that no logit lies below it, and finite, so that weights of rows without a
# key come to 0.
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def by_thread(x):
    """`[64, n]` as `[64, n / 8, 4, 2]`: the third axis runs over the four threads that share a row."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def beside(x, tile):
    """`x` `[64, 4]` as `[64, 1, 4, 1]`, to be combined with `tile`, which is as `by_thread` gives it."""
    LAYOUT: gl.constexpr = tile.type.layout
    THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(x, THREAD, assert_trivial=True), 1), 3)


@gluon.jit
def of_threads(x, THREAD: gl.constexpr):
    """`x` `[64]` as `[64, 4]`: the four threads of a row get the same number."""
    return gl.convert_layout(x, gl.SliceLayout(1, THREAD))[:, None] + gl.zeros([64, 4], x.dtype, THREAD)


@gluon.jit
def row_max(scores, LAYOUT: gl.constexpr):
    """The maximum of each row, in two steps, so that a thread runs two chains of comparisons for a row instead of one."""
    by_eight = scores.reshape([scores.shape[0], scores.shape[1] // 8, 8])
    return gl.convert_layout(gl.max(gl.max(by_eight, 1), 1), LAYOUT)


@gluon.jit
def partial_sum(weight):
    """Row sums `[64, 8]` of which each thread adds only what it holds; the eight are added when the keys are done."""
    return gl.sum(weight.reshape([weight.shape[0], weight.shape[1] // 8, 8]), 1)


@gluon.jit
def query_positions(given, b, h, row, WG: gl.constexpr, C, LAYOUT: gl.constexpr):
    """The last position that each of a consumer's 64 queries may see."""
    slot = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=LAYOUT)
    if not C.CAUSAL:
        last = gl.full([64], NEVER - 1, gl.int32, LAYOUT)
    elif C.Q_IN_ORDER:
        last = slot + given.sizes.offset
    else:
        strides = given.strides.q_position
        head = given.pointers.q_position + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
        last = gl.load(head + slot)
    return last


@gluon.constexpr_function
def _keep_asm(n):
    """PTX for `_kept`: of `n` numbers, number `i` becomes -inf unless its bit is set.

    By the order that `on_registers` states, number `i` is of row `i / 2 % 2`. It is of that row's key `i / 4 * 2 + i % 2`,
    which is also its bit. The constant 0fFF800000 is -inf.
    """
    n = int(n)
    text = "{ .reg .b32 t; .reg .pred p; "
    for i in range(n):
        bit = 1 << (i // 4 * 2 + i % 2)
        text += f"and.b32 t, ${2 * n + i // 2 % 2 * 2}, {bit}; setp.ne.u32 p, t, 0; selp.f32 ${i}, ${i}, 0fFF800000, p; "
    return text + "}"


@gluon.constexpr_function
def _constraints(n, kind):
    """Operands of `on_registers`: `n` outputs, `n` inputs in the same registers, and `n` inputs of another kind."""
    n, kind = int(n), str(kind)
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [kind] * n)


@gluon.jit
def on_registers(tile, of_rows, ASM: gl.constexpr, KIND: gl.constexpr):
    """Runs `ASM` once on all `n` numbers that a thread holds of `tile`, as operands $0 to $n-1, in place.

    The numbers come in pairs, the first row's and the second row's in turn. So $0 and $1 are of the first row, $2 and $3 of
    the second, $4 and $5 of the first again. Operand $2n+i is the entry of `of_rows` `[64, 4]` for number `i`, so all of the
    first row equal $2n and all of the second $2n+2. `KIND` is the kind of register of `of_rows`: r (32 bits) or f (fp32).
    """
    LAYOUT: gl.constexpr = tile.type.layout
    N: gl.constexpr = tile.shape[1] // 2
    x = by_thread(tile)
    y = gl.inline_asm_elementwise(
        ASM, _constraints(N, KIND), [x, beside(of_rows, x)], gl.float32, is_pure=True, pack=N
    )
    return gl.convert_layout(y.reshape([tile.shape[0], tile.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _rescale_asm(n):
    """PTX for `rescaled`: multiplies a thread's `n` numbers by its rows' factors, unless no lane of the warp needs it.

    Operands are those of `on_registers`: number `i` is $i and its factor $(2n+i), so the factors of a thread's two rows are
    $2n and $(2n+2). `p` is whether one of them is not 1 (0f3F800000). The vote tells all lanes whether any lane has such a
    row; if none has, the whole warp skips the products.
    """
    n = int(n)
    text = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000;"
        " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; "
    )
    return text + " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)) + " DONE: }"


@gluon.jit
def of_rows(x, LAYOUT: gl.constexpr):
    """`x` `[64, 4]`, where the four threads of a row hold the same number, as `[64]`."""
    return gl.convert_layout(gl.max(x, 1), LAYOUT)


@gluon.jit
def rescaled(sums, rescale):
    """`sums * rescale`, with a factor for each row and thread `[64, 4]`; a warp all of whose factors are 1 skips it."""
    return on_registers(sums, rescale, _rescale_asm(sums.shape[1] // 2), "f")


@gluon.jit
def _kept(scores, bits):
    """Scores, with -inf where the key's bit is 0, of `bits` `[64, 4]` int32 from the first key of a row and thread on."""
    return on_registers(scores, bits, _keep_asm(scores.shape[1] // 2), "r")


@gluon.jit
def _bits_up_to(limit, THREAD: gl.constexpr, PIECE: gl.constexpr):
    """Bits, `[64, 4]`, of a thread's keys among the first `PIECE` columns: 1 up to column `limit` `[64]`, 0 after it.

    The keys of thread `t` are the columns `8 j + 2 t + e` for `e` in 0 and 1. With `left = limit - 2 t` those at most
    `limit` have `8 j + e <= left`. These are two for each `j` below `left >> 3`. For `j = left >> 3` itself it is one, or
    two if `left & 7` is not 0. As keys stand in rising order, their bits are the lowest `count`; a shift by 32 has no
    meaning.
    """
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, THREAD))
    left = of_threads(limit, THREAD) - 2 * thread[None, :]
    count = (left >> 3) * 2 + 1 + gl.minimum(left & 7, 1)
    count = gl.minimum(gl.where(left < 0, 0, count), PIECE // 4)
    return gl.where(count == 32, -1, (1 << (count & 31)) - 1)


@gluon.jit
def with_sink(highest, whole, sinks_ptr, h, split_slot):
    """Base-2 logarithm of a row's sum of weights, and the sum relative to `highest`, both with the sink of head `h`.

    `whole` is the sum without it. Splits of a list, whose `split_slot` is not below 0, get theirs in `_combine`.
    """
    sink = gl.load(sinks_ptr + h) * 1.4426950408889634  # log2(e)
    sink = gl.where(split_slot >= 0, float("-inf"), sink)
    top = gl.maximum(highest, sink)
    of_keys = gl.exp2(highest - top)
    total = whole * of_keys + gl.exp2(sink - top)
    # Where the sink outweighs all keys by more than fp32 can say, the sum is infinite relative to `highest`, and the mean 0.
    return top + gl.log2(total), total / of_keys


@gluon.jit
def masked_scores(scores, last, given, stage, valid, position_at, C, window=None):
    """Scores, with -inf where a slot holds no key, or one after `last`, the last position that the query may see.

    `given.buffers.starts` has the first slot of each of the tile's pieces, of which the first `valid` exist. With a `window` a query
    sees that many positions, of which `last` is the last one.
    """
    PIECE: gl.constexpr = scores.shape[1] // C.PIECES
    if C.K_IN_ORDER:
        THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(scores).type.layout))
        bits = gl.zeros([64, 4], gl.int32, THREAD)
        for p in gl.static_range(C.PIECES):
            limit = (last if C.CAUSAL else gl.minimum(last, given.sizes.N - 1)) - read(
                given.buffers.starts, stage * C.PIECES + p, 4
            )
            limit = gl.where(p < valid, limit, -1)
            seen = _bits_up_to(limit, THREAD, PIECE)
            if window is not None:
                seen = seen & ~_bits_up_to(limit - window, THREAD, PIECE)
            bits = bits | (seen << (p * PIECE // 4))
        scores = _kept(scores, bits)
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        column = gl.arange(0, scores.shape[1], layout=LAYOUT)
        for p in gl.static_range(C.PIECES):
            start = read(given.buffers.starts, stage * C.PIECES + p, 4)
            position = gl.load(given.pointers.k_position + position_at + start + column % PIECE)
            position = gl.where(position >= 0, position, NEVER)
            allowed = position[None, :] <= gl.where(p < valid, last, -1)[:, None]
            if window is not None:
                allowed = allowed & (position[None, :] > (last - window)[:, None])
            if C.PIECES > 1:
                allowed = allowed | (column // PIECE != p)[None, :]
            scores = gl.where(allowed, scores, float("-inf"))
    return scores

"""Rows of scores in the registers of a consumer on Hopper: which keys are allowed, maxima and sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.hopper_queue import read

NEVER = gl.constexpr(2**31 - 1)
LOWEST = gl.constexpr(-1.0e30)  # of a row's maximum: where nothing is allowed, weights come to 0


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


@gluon.jit
def masked_scores(scores, last, starts, stage, valid, k_position_ptr, position_at, N, C):
    """-inf where a slot holds no key, or one after the last that the query may see."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    PIECE: gl.constexpr = scores.shape[1] // C.PIECES
    column = gl.arange(0, scores.shape[1], layout=LAYOUT)
    for p in gl.static_range(C.PIECES):
        start = read(starts, stage * C.PIECES + p, 4)
        if C.K_IN_ORDER:
            limit = (last if C.CAUSAL else gl.minimum(last, N - 1)) - start
            position = column - p * PIECE
        else:
            limit = last
            position = gl.load(k_position_ptr + position_at + start + column % PIECE)
            position = gl.where(position >= 0, position, NEVER)
        limit = gl.where(p < valid, limit, -1)
        allowed = position[None, :] <= limit[:, None]
        if C.PIECES > 1:
            allowed = allowed | (column // PIECE != p)[None, :]
        scores = gl.where(allowed, scores, float("-inf"))
    return scores

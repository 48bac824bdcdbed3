"""How the consumers of `gather_attention_hopper.py` agree whether a row has seen enough."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def post_vote(votes, voted, turn, gain, total, live, tau, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Of each warp's queries, the most by which a gain exceeds its share, or the sum: satisfied below 0.

    Two turns later the other consumer has posted, so has read, one more: the place is free again.
    """
    if C.MEAN:
        added = gl.convert_layout(gl.sum(gain, 1), ROW)
        before = gl.convert_layout(gl.sum(total, 1), ROW)
        share = gl.where(before > 0.0, added / gl.where(before > 0.0, before, 1.0), float("inf"))
        vote = gl.sum(gl.where(live, share - tau, 0.0).reshape([4, 16]), 1)
    else:
        excess = gl.convert_layout(gl.sum(gain - tau * total, 1), ROW)
        vote = gl.max(gl.where(live, excess, -1.0).reshape([4, 16]), 1)
    votes.index(turn % 2 * C.CONSUMERS + WG).store(vote)
    if C.CONSUMERS == 2:
        mbarrier.arrive(voted.index(turn % 2), count=1)


@gluon.jit
def is_satisfied(votes, voted, turn, C):
    """Whether all queries of the row are, or their mean is; the same in both consumers."""
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    if C.CONSUMERS == 2:
        mbarrier.wait(voted.index(turn % 2), (turn // 2) & 1)
    each = votes.index(turn % 2 * C.CONSUMERS).load(four)
    if C.CONSUMERS == 2:
        other = votes.index(turn % 2 * C.CONSUMERS + 1).load(four)
        each = each + other if C.MEAN else gl.maximum(each, other)
    vote = gl.sum(each, 0) if C.MEAN else gl.max(each, 0)
    return vote < 0.0

"""How the consumers of `gather_attention_hopper.py` agree whether a row has seen enough.

After a tile of keys each consumer posts votes for its queries (`post_vote`), and in the next step each combines the
votes of all (`is_satisfied`), so that both decide alike. Votes and their barriers have two positions, used in turn.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def post_vote(votes, voted, turn, gain, total, live, tau, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Posts one vote for each warp's 16 queries, which is below 0 if they are satisfied.

    The vote is the most by which a query's gain exceeds `tau` times its sum before the block; with `MEAN` it is the sum,
    over queries, of the gain's share less `tau`. Places without a query never vote against.

    No wait is needed before turn `n + 2` overwrites turn `n`: this consumer has read turn `n + 1`, so the other one had
    posted that, and it reads turn `n` before it posts turn `n + 1`.
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
    """Whether all queries of the row are satisfied, or with `MEAN` their mean is; both consumers get the same answer."""
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    if C.CONSUMERS == 2:
        mbarrier.wait(voted.index(turn % 2), (turn // 2) & 1)
    each = votes.index(turn % 2 * C.CONSUMERS).load(four)
    if C.CONSUMERS == 2:
        other = votes.index(turn % 2 * C.CONSUMERS + 1).load(four)
        each = each + other if C.MEAN else gl.maximum(each, other)
    vote = gl.sum(each, 0) if C.MEAN else gl.max(each, 0)
    return vote < 0.0

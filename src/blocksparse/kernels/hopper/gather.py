"""Keys that are gathered on Hopper: the warps that load them, and the votes by which a row stops.

Four warps gather for `gather_attention_hopper.py`. Each thread copies 16 bytes at a time, straight into shared memory (cp.async). A thread cannot ask for one copy, but only
wait until all but its last so many groups of copies are done. So keys are announced to the consumers once the next keys
are in flight, and values likewise.

After a tile of keys each consumer posts votes for its queries (`post_vote`), and in the next step each combines the
votes of all (`is_satisfied`), so that both decide alike. Votes and their barriers have two slots, used in turn.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocksparse.kernels.common.names_triton import reinterpret, thread_load
from blocksparse.kernels.hopper.rows import NEVER
from blocksparse.kernels.hopper.tile_scheduler import read

_EMPTY = gl.constexpr(2**32 - 1)  # the position of an empty slot: -1, read as unsigned


@gluon.jit
def _gather(source, stride, at, memory, C):
    """Starts to copy the rows with the numbers `at` into `memory`, zeros for empty slots; `stride` is in bytes."""
    stride = gl.full([C.BLOCK_N], 0, gl.uint32, at.type.layout) + stride
    # One instruction multiplies two numbers of 32 bits into one of 64; the compiler would take a product of 64 bits.
    offset = gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [at, stride], gl.uint64, is_pure=True, pack=1
    )
    rows = source + gl.multiple_of(offset, 16)[:, None]
    thread_load(memory, rows, mask=(at != _EMPTY)[:, None])


@gluon.jit
def _offer(slots, flags, position, limit, stage, one: gl.constexpr):
    """Stores the positions of a tile's keys, and as a flag whether one is after `limit`, so that consumers must mask."""
    slots.index(stage).store(gl.minimum(position, gl.to_tensor(NEVER).to(gl.uint32)).to(gl.int32))
    flags.index(stage).store(gl.full([1], 0, gl.int32, one) + (gl.max(position, 0) > limit).to(gl.int32))


@gluon.jit
def load_gathered(C, given):
    """Gathers the tiles of keys of a row, and their values.

    A block's number is read two tiles before its keys are gathered, and the tokens in its slots one tile before, so that
    no copy waits for a list.

    Order: round `t` starts the keys of tile `t + 1` as one group of copies, and waits until all groups but that one are
        done. Then it announces the keys of `t` and the values of `t - 1`, and starts the values of `t` as the next group.
        Before tile `t` is written into its stage, the consumers must have given the stage back `t // STAGES` times. The wait
        names the parity of the phase before, as `make_rings` explains.

    Early stop: consumers that stop in step `s` store `s` in `halt` before they give back the keys of tile `s`. To load tile
    `t`, the loader waits for the keys of `t - STAGES`. Then it reads `halt`, and ends only if `halt` is at most `t -
    STAGES`. A stop at such a step was stored before that wait ended. A stop at a later step, which some warps might see and
    others not, changes nothing. So all four warps end at the same tile, `s + STAGES`. By then the loader has only to gather
    values up to tile `s + STAGES - 1`. The consumers give back the stage of that tile, as tile `s - 1`, in step `s`. So no
    warp waits for ever.
    """
    pointers, bars, bufs, strides, sizes = given
    k_ptr, v_ptr, slots_ptr, list_ptr = pointers
    k_full, v_full, k_empty, v_empty = bars
    k_halves, v_halves, slots, flags, halt = bufs
    tiles, limit = sizes
    ALL: gl.constexpr = gl.BlockedLayout([C.BLOCK_N // 32], [32], [4], [0])  # every warp holds all slots
    EIGHTS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])  # eight threads per 128 bytes
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    k_bufs = reinterpret(k_halves, gl.int8, [C.STAGES, C.BLOCK_N, 2 * C.D], BYTES)
    v_bufs = reinterpret(v_halves, gl.int8, [C.STAGES, C.BLOCK_N, 2 * C.D], BYTES)
    lanes = gl.arange(0, 2 * C.D, layout=gl.SliceLayout(0, EIGHTS))[None, :]
    k_desc = k_ptr.to(gl.pointer_type(gl.int8), bitcast=True) + lanes
    v_desc = v_ptr.to(gl.pointer_type(gl.int8), bitcast=True) + lanes
    k_stride, v_stride = (strides[0] * 2).to(gl.uint32), (strides[1] * 2).to(gl.uint32)
    limit = limit.to(gl.uint32)
    column = gl.arange(0, C.BLOCK_N, layout=ALL)
    row = gl.arange(0, C.BLOCK_N, layout=gl.SliceLayout(1, EIGHTS))
    slots_ptr = slots_ptr.to(gl.pointer_type(gl.uint32), bitcast=True)
    last = gl.maximum(tiles - 1, 0)
    # A block's number is loaded once per lane, and reduced to one value only where it is used. As a scalar it would go
    # to a uniform register, for which the warp would wait at once.
    lists = list_ptr + gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    there = tiles > 0  # a row without blocks gets one tile without keys
    block = gl.load(list_ptr, mask=there, other=0)
    start = slots_ptr + block * (C.K_SPLIT * C.BLOCK_N)
    position = gl.where(there, gl.load(start + column), _EMPTY)
    at = gl.where(there, gl.load(start + row), _EMPTY)
    block = gl.load(lists + gl.minimum(last, 1) // C.K_SPLIT, mask=there, other=0)
    _gather(k_desc, k_stride, at, k_bufs.index(0), C)
    async_copy.commit_group()
    _offer(slots, flags, position, limit, 0, one)
    start = slots_ptr + (gl.max(block, 0) * C.K_SPLIT + gl.minimum(last, 1) % C.K_SPLIT) * C.BLOCK_N
    position = gl.load(start + column)
    next_at = gl.load(start + row)
    block = gl.load(lists + gl.minimum(last, 2) // C.K_SPLIT, mask=there, other=0)
    t = 0
    going = True
    while going:
        v_stage = t % C.STAGES
        v_phase = ((t // C.STAGES) & 1) ^ 1
        before = (t + C.STAGES - 1) % C.STAGES
        has_before = t > 0
        t += 1
        stage = t % C.STAGES
        more = t < tiles
        mbarrier.wait(k_empty.index(stage), ((t // C.STAGES) & 1) ^ 1, pred=more)
        going = more & (read(halt, 0, 4) > t - C.STAGES)
        if going:
            _gather(k_desc, k_stride, next_at, k_bufs.index(stage), C)
            _offer(slots, flags, position, limit, stage, one)
        async_copy.commit_group()
        # All copies but these keys are done: the keys of the tile before, and the values of the one before that.
        async_copy.wait_group(1)
        fence_async_shared()
        mbarrier.arrive(k_full.index(v_stage), count=1)
        mbarrier.arrive(v_full.index(before), count=1, pred=has_before)
        start = slots_ptr + (gl.max(block, 0) * C.K_SPLIT + gl.minimum(t + 1, last) % C.K_SPLIT) * C.BLOCK_N
        position = gl.load(start + column)
        later = gl.load(start + row)
        block = gl.load(lists + gl.minimum(t + 2, last) // C.K_SPLIT, mask=there, other=0)
        mbarrier.wait(v_empty.index(v_stage), v_phase)
        _gather(v_desc, v_stride, at, v_bufs.index(v_stage), C)
        async_copy.commit_group()
        at = next_at
        next_at = later
    async_copy.wait_group(0)  # for the last values; also, no copy may be in flight when the program ends
    fence_async_shared()
    mbarrier.arrive(v_full.index((t - 1) % C.STAGES), count=1)


@gluon.jit
def post_vote(votes, voted, vote_round, gain, total, live, tau, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Posts one vote for each warp's 16 queries, which is below 0 if they are satisfied.

    The vote is the most by which a query's gain exceeds `tau` times its sum before the block. With `MEAN` it is the sum,
    over queries, of the gain's share less `tau`. Slots without a query never vote against.

    No wait is needed before round `n + 2` overwrites round `n`. This consumer has read round `n + 1`, so the other one had
    posted it. The other one reads round `n` before it posts round `n + 1`.
    """
    if C.MEAN:
        added = gl.convert_layout(gl.sum(gain, 1), ROW)
        before = gl.convert_layout(gl.sum(total, 1), ROW)
        share = gl.where(before > 0.0, added / gl.where(before > 0.0, before, 1.0), float("inf"))
        vote = gl.sum(gl.where(live, share - tau, 0.0).reshape([4, 16]), 1)
    else:
        excess = gl.convert_layout(gl.sum(gain - tau * total, 1), ROW)
        vote = gl.max(gl.where(live, excess, -1.0).reshape([4, 16]), 1)
    votes.index(vote_round % 2 * C.CONSUMERS + WG).store(vote)
    if C.CONSUMERS == 2:
        mbarrier.arrive(voted.index(vote_round % 2), count=1)


@gluon.jit
def is_satisfied(votes, voted, vote_round, C):
    """Whether all queries of the row are satisfied, or with `MEAN` their mean is; both consumers get the same answer."""
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    if C.CONSUMERS == 2:
        mbarrier.wait(voted.index(vote_round % 2), (vote_round // 2) & 1)
    each = votes.index(vote_round % 2 * C.CONSUMERS).load(four)
    if C.CONSUMERS == 2:
        other = votes.index(vote_round % 2 * C.CONSUMERS + 1).load(four)
        each = each + other if C.MEAN else gl.maximum(each, other)
    vote = gl.sum(each, 0) if C.MEAN else gl.max(each, 0)
    return vote < 0.0

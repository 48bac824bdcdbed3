"""`gather_attention` on Hopper: warps that gather keys and values, and warps that compute, at the same time.

One program computes one row of blocks of one head. The last rows start first, and the query heads of a KV head run side by
side. Four warps gather (`hopper/gather.py`), as many tiles of keys ahead as there are stages. Each consumer is four warps
and computes 64 queries. It starts the scores of the next keys before it multiplies the weights of the last ones with their
values. So the softmax in between is hidden behind matrix products.

Once a row has visited what it visits in any case, the consumers vote after every tile of keys whether the row is
satisfied (`hopper/gather.py`). They learn the result one tile later, when the next scores are in flight already;
after a stop those are thrown away.

Every buffer has a full and an empty barrier, used as `make_rings` in `hopper/tile_scheduler.py` explains. Here a full barrier
expects no bytes: the loader arrives at it when its own copies are done.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of `_Constants` as objects, not as strings.

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocksparse.kernels.attention.gather_attention_triton import axis_strides, gathered_by
from blocksparse.kernels.common.names_triton import aggregate
from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.hopper.gather import is_satisfied, load_gathered, post_vote
from blocksparse.kernels.hopper.rows import LOWEST, NEVER, partial_sum, row_max
from blocksparse.kernels.hopper.tile_scheduler import consumer_registers, make_barriers, positive, read, registers
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.launch.launches import remembered

_LOADER_REGISTERS = gl.constexpr(56)  # of each thread of the loading warps, once registers are reallocated


def tile_options(q_block: int, k_block: int, head_dim: int) -> dict[str, int]:
    """How the kernel is launched, so that it fits on chip: one program per multiprocessor with 128 queries, two with 64."""
    consumers = q_block // 64
    block_n = min(k_block, 64 * consumers)
    # Bytes of shared memory left for the stages, that is for keys, values and positions. A program may have 227 KiB, or
    # each of two 113; queries take their part, and 640 bytes are for barriers, arguments and reductions.
    room = (227 if consumers == 2 else 113) * 1024 - q_block * head_dim * 2 - 640
    return {
        "CONSUMERS": consumers,
        "BLOCK_N": block_n,
        "K_SPLIT": max(k_block // block_n, 1),
        "STAGES": min(room // (block_n * (head_dim * 4 + 4)), 6),
    }


def gather_attention_hopper(
    q: Tensor, k: Tensor, v: Tensor, lists: RankedLists, positions: TokenPositions, rule: StopRule, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel. The arguments are those of `gather_attention`; `fits_hopper` says which of them it takes."""
    (B, Hq, M, D), Hkv, N = q.shape, k.shape[1], k.shape[2]
    out = empty_as(q, D, v.dtype)
    q, scale = positive(q, scale)
    q, k, v = (x if _copied_in_16_bytes(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    index, opened, count, group, tau = gathered_by(lists, positions, rule)
    lse = q.new_empty((B, Hq, M), dtype=torch.float32)
    visited = opened.new_empty(opened.shape)
    rows, cols = index.shape[2:]
    tiles = tile_options(lists.q_block, lists.k_block, D)
    consumers, per_sm = tiles["CONSUMERS"], 3 - tiles["CONSUMERS"]
    _kernel[(rows * (Hq // Hkv), Hkv, B)](
        q, k, v, out, lse, visited,
        index, opened, count, positions.q_position, positions.k_position, group, tau,
        axis_strides(q), axis_strides(k), axis_strides(v), out.stride()[:3], *lse.stride()[:2],
        axis_strides(positions.q_position), axis_strides(positions.k_position),
        rows, cols, N - M if positions.causal else 0,
        Hq // positions.k_position.shape[1], scale * math.log2(math.e), rule.patience,
        D=D, **tiles, CAUSAL=positions.causal, MEAN=rule.mean,
        CONSUMER_REGISTERS=consumer_registers(consumers, per_sm, _LOADER_REGISTERS.value),
        num_warps=4, maxnreg=registers(consumers, per_sm),
    )  # fmt: skip
    return out, lse, visited


def _copied_in_16_bytes(x: Tensor) -> bool:
    """Whether the compiler can tell that every row of `x` `[B, H, N, D]` may be copied 16 bytes at a time."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in axis_strides(x))


@aggregate
class _Constants:
    """Compile-time constants of a kernel. Constants in a plain tuple would turn into run-time values."""

    D: gl.constexpr
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr  # keys in a tile of keys
    K_SPLIT: gl.constexpr  # tiles of keys per block
    STAGES: gl.constexpr  # tiles of keys, and of values, in shared memory
    CAUSAL: gl.constexpr
    MEAN: gl.constexpr  # as `mean` of `gather_attention`

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


@gluon.constexpr_function
def _row_layout(D, rows):
    """A layout of `[rows, D]` for four warps, in which each thread reads and writes 16 bytes of a row."""
    lanes = D // 8
    return gl.BlockedLayout([max(rows * lanes // 128, 1), 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _masked(scores, last, slots):
    """`-inf` where a slot holds no key, or one after the last that the query may see."""
    position = slots.load(gl.SliceLayout(0, scores.type.layout))
    return gl.where(position[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def _wait(full, t, C, pred=True):
    """Waits for the gathered rows of tile `t`. The loader has fenced them, so matrix products may read them."""
    mbarrier.wait(full.index(t % C.STAGES), (t // C.STAGES) & 1, pred=pred)


@gluon.jit
def _consume(WG: gl.constexpr, C, given):
    """Attention of 64 queries; the weights of tile `t - 1` are not yet multiplied with their values when step `t` begins."""
    pointers, bars, bufs, strides, sizes = given
    q_ptr, q_position_ptr, out_ptr, lse_ptr, visited_ptr = pointers
    k_full, v_full, k_empty, v_empty, voted = bars
    q_bufs, k_bufs, v_bufs, slots, flags, halt, votes = bufs
    q_stride, out_stride = strides
    opened, tiles, offset, scale, tau, patience, ends_at = sizes
    HALF: gl.constexpr = q_bufs.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    WHOLE: gl.constexpr = _row_layout(C.D, 64)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    none = gl.zeros([64, C.BLOCK_N], gl.float32, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, partial_sum(none).type.layout)
    q = q_bufs.index(WG)
    position_ptr = q_position_ptr + WG * 64

    dims = gl.arange(0, C.D, layout=gl.SliceLayout(0, WHOLE))
    at = gl.load(position_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, WHOLE)))
    rows = q_ptr + ((at - offset).to(gl.int64) * q_stride)[:, None] + dims[None, :]
    q.store(gl.load(rows, mask=(at >= 0)[:, None], other=0.0))
    fence_async_shared()
    q_at = gl.load(position_ptr + gl.arange(0, 64, layout=ROW))
    live = q_at >= 0
    seen = q_at if C.CAUSAL else gl.full([64], NEVER - 1, gl.int32, ROW)

    _wait(k_full, 0, C)
    scores_token = warpgroup_mma(q, k_bufs.index(0).permute([1, 0]), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores_token])
    if read(flags, 0, 4) != 0:
        scores = _masked(scores, seen, slots.index(0))
    mbarrier.arrive(k_empty.index(0), count=1)
    highest = gl.maximum(row_max(scores, ROW) * scale, LOWEST)
    weight = gl.exp2(scores * scale - highest[:, None])
    total = partial_sum(weight)
    sums = gl.zeros([64, C.D], gl.float32, SUMS)
    operand = gl.convert_layout(weight.to(HALF), WEIGHT)
    _wait(k_full, 1, C, tiles > 1)

    # `total` is the sum of weights before the current block, and `gain` what the block adds: the vote compares them.
    gain = total
    total = gl.zeros_like(gain)
    t = 1
    low = 0
    going = tiles > 1
    while going:
        stage = t % C.STAGES
        v_stage = (t - 1) % C.STAGES
        scores_token = warpgroup_mma(q, k_bufs.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
        _wait(v_full, t - 1, C)
        sums_token = warpgroup_mma(operand, v_bufs.index(v_stage), sums, is_async=True)
        partial = read(flags, stage, 4) != 0
        first = t % C.K_SPLIT == 0
        stop = False
        if t > opened:
            satisfied = is_satisfied(votes, voted, t - opened - 1, C)
            # Only the vote after a block's last tile is about the whole block; it is read in the next block's first step.
            low = gl.where(first, gl.where(satisfied, low + 1, 0), low)
            stop = low >= patience
            if stop:  # both consumers decide alike, and store the same number
                halt.index(0).store(gl.full([1], 0, gl.int32, one) + t)
        # Of the two products in flight only the older one, the scores, is waited for.
        scores = warpgroup_mma_wait(1, [scores_token])
        if partial:
            scores = _masked(scores, seen, slots.index(stage))
        mbarrier.arrive(k_empty.index(stage), count=1)
        new = gl.where(stop, highest, gl.maximum(highest, row_max(scores, ROW) * scale))
        weight = gl.exp2(scores * scale - new[:, None])
        rescale = gl.exp2(highest - new)
        highest = new
        by = gl.convert_layout(rescale, SUM_ROW)[:, None]
        total = gl.where(first, total + gain, total) * by
        gain = gl.where(stop, 0.0, gl.where(first, 0.0, gain * by) + partial_sum(weight))
        if t >= opened:
            post_vote(votes, voted, t - opened, gain, total, live, tau, WG, C, ROW)
        # This wait stands here so that the compiler leaves the exponentials above the wait for the sums.
        _wait(k_full, t + 1, C, t + 1 < tiles)
        sums, weight = warpgroup_mma_wait(0, [sums_token, weight])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        operand = gl.convert_layout(weight.to(HALF), WEIGHT)
        sums = sums * gl.convert_layout(rescale, OUT_ROW)[:, None]
        t += 1
        going = (low < patience) & (t < tiles)

    if low < patience:
        _wait(v_full, t - 1, C)
        sums_token = warpgroup_mma(operand, v_bufs.index((t - 1) % C.STAGES), sums, is_async=True)
        sums = warpgroup_mma_wait(0, [sums_token])
    if WG == 0:
        gl.store(visited_ptr, gl.where(low < patience, ends_at, (t - 1) // C.K_SPLIT))
    whole = gl.convert_layout(gl.sum(total + gain, 1), ROW)
    log_sum = (highest + gl.log2(whole)) * 0.6931471805599453  # ln 2: scores are in base 2
    log_sum = gl.where(whole == 0.0, float("-inf"), log_sum)
    gl.store(lse_ptr + (q_at - offset), log_sum, mask=live)
    whole = gl.convert_layout(whole, OUT_ROW)
    q.store(gl.where((whole == 0.0)[:, None], 0.0, sums * (1.0 / whole)[:, None]).to(HALF))
    at = gl.load(position_ptr + gl.arange(0, 64, layout=gl.SliceLayout(1, WHOLE)))
    rows = out_ptr + ((at - offset).to(gl.int64) * out_stride)[:, None] + dims[None, :]
    gl.store(rows, q.load(WHOLE), mask=(at >= 0)[:, None])


@remembered
@gluon.jit(do_not_specialize=["lse_stride_b", "lse_stride_h", "rows", "cols", "offset"])
def _kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, visited_ptr,
    index_ptr, opened_ptr, count_ptr, q_position_ptr, k_position_ptr, group_ptr, tau_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_stride_b, lse_stride_h, q_position_strides, k_position_strides,
    rows, cols, offset,
    heads_per_map, scale_log2, patience,
    D: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, K_SPLIT: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MEAN: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    heads_per_key = gl.num_programs(0) // rows
    row = rows - 1 - gl.program_id(0) // heads_per_key  # late rows are the longest: start them first
    h_key = gl.program_id(1)
    h = h_key * heads_per_key + gl.program_id(0) % heads_per_key
    b = gl.program_id(2)
    batch = b.to(gl.int64)

    q_ptr += batch * q_strides[0] + h.to(gl.int64) * q_strides[1]
    k_ptr += batch * k_strides[0] + h_key.to(gl.int64) * k_strides[1]
    v_ptr += batch * v_strides[0] + h_key.to(gl.int64) * v_strides[1]
    out_ptr += batch * out_strides[0] + h.to(gl.int64) * out_strides[1]
    lse_ptr += batch * lse_stride_b + h.to(gl.int64) * lse_stride_h
    q_position_ptr += batch * q_position_strides[0] + h.to(gl.int64) * q_position_strides[1]
    q_position_ptr += row * (64 * CONSUMERS)
    map_at = batch * k_position_strides[0] + (h // heads_per_map).to(gl.int64) * k_position_strides[1]
    k_position_ptr += map_at + gl.load(group_ptr + row).to(gl.int64) * k_position_strides[2]
    list_at = (batch * gl.num_programs(1) * heads_per_key + h) * rows + row
    index_ptr += list_at * cols
    visited_ptr += list_at

    q_at = gl.load(q_position_ptr + gl.arange(0, 64 * CONSUMERS, layout=gl.BlockedLayout([1], [32], [4], [0])))
    least = gl.min(gl.where(q_at >= 0, q_at, NEVER), 0)  # position of the row's first query, or NEVER
    limit = least if CAUSAL else NEVER - 1
    count = gl.load(count_ptr + list_at)
    opened = gl.minimum(gl.load(opened_ptr + list_at), count)
    tau = gl.load(tau_ptr + h)
    # `blocks` is how many blocks are visited without a vote. If `tau` is not above 0 that is all of them, for no gain is
    # less than 0. The first block is always one of them, for before it there is no sum that its gain could be little of.
    blocks = gl.where(tau > 0.0, gl.minimum(gl.maximum(opened, 1), count), count)
    ends_at = count
    # A row without queries visits no keys, but must report what the other implementations do: "every query is satisfied"
    # is true of no queries, so the row stops as early as it can; "their mean is below tau" is not, so it never stops.
    if least == NEVER:
        if not MEAN:
            ends_at = gl.where(tau > 0.0, gl.minimum(opened + patience, count), count)
        blocks = 0
        count = 0
    tiles = count * K_SPLIT

    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    HALF: gl.constexpr = q_ptr.dtype.element_ty
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_bufs = gl.allocate_shared_memory(HALF, [CONSUMERS, 64, D], SHARED)
    k_bufs = gl.allocate_shared_memory(HALF, [STAGES, BLOCK_N, D], SHARED)
    v_bufs = gl.allocate_shared_memory(HALF, [STAGES, BLOCK_N, D], SHARED)
    slots = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], mbarrier.MBarrierLayout())
    flags = gl.allocate_shared_memory(gl.int32, [STAGES, 1], mbarrier.MBarrierLayout())
    halt = gl.allocate_shared_memory(gl.int32, [1, 1], mbarrier.MBarrierLayout())
    # Each ring of barriers is allocated on its own: with one allocation for all, the compiler would make a consumer's warps
    # wait for each other before each wait.
    k_full = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_empty = make_barriers(STAGES, CONSUMERS)
    votes = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, 4], mbarrier.MBarrierLayout())
    # One consumer needs no barrier for its votes. It must not make any either: barriers that no warp uses share their
    # memory with the arguments that the compiler hands to the warps, and overwrite them where programs are interrupted.
    if CONSUMERS == 2:
        voted = make_barriers(2, CONSUMERS)
    else:
        voted = votes
    halt.index(0).store(gl.full([1], NEVER, gl.int32, one))
    fence_async_shared()
    C = _Constants(
        D=D, CONSUMERS=CONSUMERS, BLOCK_N=BLOCK_N, K_SPLIT=K_SPLIT, STAGES=STAGES, CAUSAL=CAUSAL, MEAN=MEAN
    )
    load = (
        (k_ptr, v_ptr, k_position_ptr, index_ptr), (k_full, v_full, k_empty, v_empty),
        (k_bufs, v_bufs, slots, flags, halt), (k_strides[2], v_strides[2]), (tiles, limit),
    )  # fmt: skip
    consume = (
        (q_ptr, q_position_ptr, out_ptr, lse_ptr, visited_ptr), (k_full, v_full, k_empty, v_empty, voted),
        (q_bufs, k_bufs, v_bufs, slots, flags, halt, votes), (q_strides[2], out_strides[2]),
        (blocks * K_SPLIT, tiles, offset, scale_log2, tau, patience, ends_at),
    )  # fmt: skip
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (first, C, consume)), (_consume, (second, C, consume)), (load_gathered, (C, load))],
            [4, 4], [CONSUMER_REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize([(_consume, (first, C, consume)), (load_gathered, (C, load))], [4], [_LOADER_REGISTERS])

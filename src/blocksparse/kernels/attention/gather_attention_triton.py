"""The portable Triton kernel of `gather_attention`: fp16, bf16 and fp32.

One program computes one row of blocks of one head, since the early stop is decided for a row as a whole. The longest
rows start first. The softmax is in base 2, sums are in fp32, and the result is exact up to rounding.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike, head_at, log_sum, rows_of, step
from blocksparse.kernels.common.hardware import Hardware, fitted, fp32_products, hardware_of, of_attention
from blocksparse.kernels.common.sizes import REMEMBERED, empty_as, power_of_2
from blocksparse.kernels.gemm.strided_products_triton import largest, total
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.launch.launches import remembered

# Blocks in a loop of known length. What it computes after its row has stopped is thrown away.
_AHEAD = 4


def gather_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, lists: RankedLists, positions: TokenPositions, rule: StopRule, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as in `gather_attention`."""
    (B, Hq, M, D), (_, Hkv, N, _), Dv = q.shape, k.shape, v.shape[-1]
    out = empty_as(q, Dv, v.dtype)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    index, opened, count, group, tau = gathered_by(lists, positions, rule)
    lse = q.new_empty((B, Hq, M), dtype=torch.float32)
    visited = opened.new_empty(opened.shape)
    rows, cols = index.shape[2:]
    launch = launch_options(lists.q_block, lists.k_block, max(D, Dv), q.element_size(), hardware_of(q))
    _kernel[(rows, Hq, B)](
        q, k, v, out, lse, visited,
        index, opened, count, positions.q_position, positions.k_position, group, tau,
        q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3], alike(*lse.stride()[:2]),
        axis_strides(positions.q_position), axis_strides(positions.k_position),
        rows, cols, N - M if positions.causal else 0,
        Hq // Hkv, Hq // positions.k_position.shape[1], scale * math.log2(math.e), rule.patience,
        D=D, DV=Dv,
        BLOCK_D=_padded(D), BLOCK_DV=_padded(Dv),
        Q_BLOCK=lists.q_block, K_BLOCK=lists.k_block, AHEAD=_AHEAD,
        CAUSAL=positions.causal, COMMIT=rule.commit, MEAN=rule.mean, PRECISION=fp32_products(),
        **launch,
    )  # fmt: skip
    return out, lse, visited


def gathered_by(lists: RankedLists, positions: TokenPositions, rule: StopRule) -> tuple[Tensor, ...]:
    """The lists, the key map of each row and `tau` as kernels read them: contiguous, and a map for every row."""
    group = positions.group_of_row
    if group is None:
        group = torch.zeros(lists.index.shape[2], dtype=torch.int32, device=lists.index.device)
    return tuple(x.contiguous() for x in (lists.index, lists.opened, lists.count, group.int(), rule.tau))


@functools.lru_cache(maxsize=REMEMBERED)
def launch_options(q_block: int, k_block: int, head_dim: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    """Tiles that hold the blocks and fit on chip; a key block wider than a tile of keys takes several."""
    row_bytes = _padded(head_dim) * itemsize
    block_m = _padded(q_block)
    warps, stages = 8 if block_m == 128 else 4, 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1
    if hardware.multiplies_from_shared:
        widest = 32 if row_bytes > 256 else 128 if itemsize <= 2 and block_m == 128 else 64
        warps = 8 if row_bytes > 256 and not hardware.is_hopper else warps
    elif hardware.is_rdna:
        widest, stages, warps = (32, 1, warps) if row_bytes <= 128 else (16, 1, 8)
    else:
        # What is held in registers leaves room for half as many keys, or takes twice as many threads.
        widest = 64 if row_bytes <= 128 and hardware.is_nvidia else 32
        warps = 8 if not 128 < row_bytes <= 256 and hardware.is_nvidia else warps
    options = {
        "BLOCK_M": block_m,
        "BLOCK_N": min(_padded(k_block), widest),
        "num_warps": warps,
        "num_stages": stages,
    }

    return fitted(options, lambda x: shared_memory(hardware, x, row_bytes, itemsize), hardware, rows=False)


def shared_memory(hardware: Hardware, options: dict[str, int], row_bytes: int, itemsize: int) -> int:
    """Bytes of shared memory of a program, at most.

    Where a token lies is itself loaded first, which takes one of three stages.
    """
    if options["num_stages"] > 2:
        options = {**options, "num_stages": options["num_stages"] - 1}
    shares = options["BLOCK_M"] * 32 if itemsize <= 2 else 0  # of all queries, which the warps tell each other
    return of_attention(hardware, options, row_bytes, row_bytes, itemsize, row_bytes) + shares


def _padded(size: int) -> int:
    """The least power of two that is not below `size` and that a matrix product takes."""
    return max(16, power_of_2(size))


def axis_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, 0 where batch or heads are broadcast."""
    first = (0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    return (*first, *x.stride()[2:-1])


@triton.jit
def _satisfied(gain, before, live, tau, MEAN: tl.constexpr):
    """Whether what a block added to the sums of weights is a share below `tau`, for every query of the row or on average."""
    share = tl.where(before > 0.0, gain / tl.where(before > 0.0, before, 1.0), float("inf"))
    share = tl.where(live, share, 0.0)
    if MEAN:
        satisfied = total(share) < tau * total(live.to(tl.float32))
    else:
        satisfied = largest(share) < tau
    return satisfied


@triton.jit
def _tile(
    slots_at, inside, running, q_tile, q_at, running_max, before, gain, accumulator,
    k_ptr, v_ptr, k_strides, v_strides, b, h_key, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over one tile of slots, if `running`; `gain` is what the block has added to the sum `before` it."""
    k_at = tl.load(slots_at, mask=inside, other=-1)
    there = k_at >= 0
    k_tile = rows_of(k_ptr, k_strides, b, h_key, k_at, there, D, BLOCK_D, False)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
    allowed = (there & running)[None, :]
    if CAUSAL:
        allowed = allowed & (k_at[None, :] <= q_at[:, None])
    scores = tl.where(allowed, scores, float("-inf"))
    new_max, weight, rescale = step(scores, running_max, True)
    v_tile = rows_of(v_ptr, v_strides, b, h_key, k_at, there, DV, BLOCK_DV, False)
    accumulator = accumulator * rescale[:, None]
    accumulator = tl.dot(weight.to(v_tile.dtype), v_tile, accumulator, input_precision=PRECISION)
    return new_max, before * rescale, gain * rescale + tl.sum(weight, 1), accumulator


@remembered
@triton.jit(do_not_specialize=["rows", "cols", "offset"])
def _kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, visited_ptr,
    index_ptr, opened_ptr, count_ptr, q_position_ptr, k_position_ptr, group_ptr, tau_ptr,
    q_strides, k_strides, v_strides, out_strides, lse_strides, q_position_strides, k_position_strides,
    rows, cols, offset,
    heads_per_key, heads_per_map, scale_log2, patience,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, CAUSAL: tl.constexpr, COMMIT: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    K_SPLIT: tl.constexpr = (K_BLOCK + BLOCK_N - 1) // BLOCK_N
    row = rows - 1 - tl.program_id(0)  # late rows are the longest: start them first
    h = tl.program_id(1)
    b = tl.program_id(2)
    h_key = h // heads_per_key

    places = tl.arange(0, BLOCK_M)
    q_position_at = b.to(tl.int64) * q_position_strides[0] + h.to(tl.int64) * q_position_strides[1]
    q_at = tl.load(q_position_ptr + q_position_at + row * Q_BLOCK + places, mask=places < Q_BLOCK, other=-1)
    live = q_at >= 0
    queries = q_at - offset
    q_tile = rows_of(q_ptr, q_strides, b, h, queries, live, D, BLOCK_D, False)  # [BLOCK_M, BLOCK_D]

    map_at = b.to(tl.int64) * k_position_strides[0] + (h // heads_per_map).to(tl.int64) * k_position_strides[1]
    slots_ptr = k_position_ptr + map_at + tl.load(group_ptr + row).to(tl.int64) * k_position_strides[2]
    list_at = (b * tl.num_programs(1) + h).to(tl.int64) * rows + row
    index_at = index_ptr + list_at * cols
    opened = tl.load(opened_ptr + list_at)
    count = tl.load(count_ptr + list_at)
    tau = tl.load(tau_ptr + h)

    slot = tl.arange(0, BLOCK_N)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # `running_sum` is the sum of weights before a block, and `gain` what the block adds. The two are joined when the next
    # block begins, here as below, so that a row gives the same bits whether its blocks are opened or stopped after.
    gain = tl.zeros_like(running_sum)
    for i in range(opened * K_SPLIT):
        first = i % K_SPLIT == 0
        running_sum = tl.where(first, running_sum + gain, running_sum)
        gain = tl.where(first, 0.0, gain)
        within = i % K_SPLIT * BLOCK_N + slot
        slots_at = slots_ptr + tl.load(index_at + i // K_SPLIT) * K_BLOCK + within
        running_max, running_sum, gain, accumulator = _tile(
            slots_at, within < K_BLOCK, True, q_tile, q_at, running_max, running_sum, gain, accumulator,
            k_ptr, v_ptr, k_strides, v_strides, b, h_key, scale_log2, D, DV, BLOCK_D, BLOCK_DV, CAUSAL, PRECISION,
        )  # fmt: skip

    tl.debug_barrier()  # with nothing in between, Triton 3.9 gives each loop's tiles separate shared memory
    visited = opened
    low = 0
    if not COMMIT:
        saved_max, saved_sum, saved_accumulator = running_max, running_sum, accumulator
    while (visited < count) & (low < patience):
        # The length of this loop is known when it starts, so that the compiler overlaps loads and products. A row may
        # stop inside it: what comes then is masked.
        for i in range(visited * K_SPLIT, tl.minimum(visited + AHEAD, count) * K_SPLIT):
            running = low < patience
            first, last = i % K_SPLIT == 0, (i + 1) % K_SPLIT == 0
            running_sum = tl.where(first, running_sum + gain, running_sum)
            gain = tl.where(first, 0.0, gain)
            if not COMMIT:
                save = first & running
                saved_max = tl.where(save, running_max, saved_max)
                saved_sum = tl.where(save, running_sum, saved_sum)
                saved_accumulator = tl.where(save, accumulator, saved_accumulator)
            within = i % K_SPLIT * BLOCK_N + slot
            slots_at = slots_ptr + tl.load(index_at + i // K_SPLIT) * K_BLOCK + within
            running_max, running_sum, gain, accumulator = _tile(
                slots_at, within < K_BLOCK, running, q_tile, q_at, running_max, running_sum, gain, accumulator,
                k_ptr, v_ptr, k_strides, v_strides, b, h_key, scale_log2, D, DV, BLOCK_D, BLOCK_DV, CAUSAL, PRECISION,
            )  # fmt: skip
            satisfied = _satisfied(gain, running_sum, live, tau, MEAN)
            asked = last & running
            low = tl.where(asked, tl.where(satisfied, low + 1, 0), low)
            visited += asked.to(tl.int32)
    running_sum += gain
    if not COMMIT:
        drop = low >= patience
        running_max = tl.where(drop, saved_max, running_max)
        running_sum = tl.where(drop, saved_sum, running_sum)
        accumulator = tl.where(drop, saved_accumulator, accumulator)
        visited -= drop.to(tl.int32)

    tl.store(visited_ptr + list_at, visited)
    empty = running_sum == 0.0
    # A row without keys is 0, even if a value is not finite: 0 times infinity is not 0.
    result = tl.where(empty[:, None], 0.0, accumulator / tl.where(empty, 1.0, running_sum)[:, None])
    dims_v = tl.arange(0, BLOCK_DV)
    out_at = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_at + queries.to(tl.int64)[:, None] * out_strides[2] + dims_v[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims_v < DV)[None, :])
    lse_at = lse_ptr + head_at(lse_strides, b, h) + queries
    tl.store(lse_at, log_sum(running_max, running_sum), mask=live)

"""The queue of tiles that the kernels for Hopper work off, and what they agree on.

A tile is what a program computes at a time: 64 queries for each of its consumers, of one row of one head's lists. A
row's list is walked from its end, so that partial blocks, which are masked, come first: the first keys of a tile
are always masked, and every later step knows from the counts whether it is. Blocks narrower than `BLOCK_N` fill
one tile of keys together, from anywhere; an odd one stands alone in the first, masked, tile.
"""

# Annotations stay what they are: Triton reads those of `Constants`.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate  # no public name up to Triton 3.7

LOADER_REGISTERS = gl.constexpr(24)

# Arguments that change with the prompt's length: nothing is compiled anew where one is 1 or a multiple of 16, or where the
# second half of some memory is aligned. Strides of tuples are looked at always; those of positions are whole blocks.
OF_PROMPT = [
    *("full_count_ptr", "partial_count_ptr", "tiles", "N", "cols", "rows", "offset"),
    *(f"{name}_stride_{axis}" for name in ("count", "index", "lse") for axis in "bh"),
]


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above 0 with the same logits: kernels for Hopper take maxima before the scale comes in."""
    if scale > 0:
        return q, scale
    return (torch.zeros_like(q), 1.0) if scale == 0 else (-q, -scale)


def registers(consumers: int, per_sm: int) -> int:
    """Of each thread at launch. Warps come in fours: the consumers', and one four that holds both loaders."""
    return 65536 // (per_sm * (consumers + 1) * 128) // 8 * 8


def consumer_registers(consumers: int, per_sm: int) -> int:
    """What is left for a thread of a consumer once the loaders have given theirs back."""
    return (registers(consumers, per_sm) * (consumers + 1) - LOADER_REGISTERS.value) // consumers // 8 * 8


@_aggregate
class Constants:
    """What a kernel is compiled for. Constants in a plain tuple would turn into run-time values."""

    DQ: gl.constexpr  # padded head dims
    DV: gl.constexpr
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr  # keys per tile
    STAGES: gl.constexpr
    PIECES: gl.constexpr  # parts of blocks that fill a tile
    K_SPLIT: gl.constexpr  # pieces per block
    Q_SPLIT: gl.constexpr  # tiles of queries per row of blocks
    CAUSAL: gl.constexpr
    Q_IN_ORDER: gl.constexpr
    K_IN_ORDER: gl.constexpr
    QK8: gl.constexpr  # int8 queries and keys
    PV8: gl.constexpr  # fp8 weights and values; these are transposed

    @gluon.constexpr_function
    def __init__(
        self, DQ, DV, CONSUMERS, BLOCK_N, STAGES, PIECES, K_SPLIT, Q_SPLIT, CAUSAL, Q_IN_ORDER, K_IN_ORDER, QK8, PV8
    ):  # fmt: skip
        self.DQ = gl.constexpr(DQ)
        self.DV = gl.constexpr(DV)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.PIECES = gl.constexpr(PIECES)
        self.K_SPLIT = gl.constexpr(K_SPLIT)
        self.Q_SPLIT = gl.constexpr(Q_SPLIT)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.Q_IN_ORDER = gl.constexpr(Q_IN_ORDER)
        self.K_IN_ORDER = gl.constexpr(K_IN_ORDER)
        self.QK8 = gl.constexpr(QK8)
        self.PV8 = gl.constexpr(PV8)


@gluon.jit
def place_of(word, rows, kv_heads, group):
    """Batch, query head, KV head and row of a tile: KV head by KV head, the last rows first."""
    tile = (word & 0xFFFFFF).to(gl.int32)
    per_key = rows * group
    key = tile // per_key
    within = tile % per_key
    h_key = key % kv_heads
    return key // kv_heads, h_key * group + within % group, h_key, rows - 1 - within // group


@gluon.jit
def packed_place(b, h, h_key, row):
    """A place in 64 bits."""
    return (b.to(gl.int64) << 48) | (h.to(gl.int64) << 32) | (h_key.to(gl.int64) << 16) | row


@gluon.jit
def unpacked_place(place):
    return (
        (place >> 48).to(gl.int32), ((place >> 32) & 0xFFFF).to(gl.int32), ((place >> 16) & 0xFFFF).to(gl.int32),
        (place & 0xFFFF).to(gl.int32),
    )  # fmt: skip


@gluon.jit
def extent(word, C):
    """Of a row's list: pieces in all, tiles of keys, pieces in the first of them, and how many tiles are masked."""
    word = gl.maximum(word, 0)
    full = ((word >> 24) & 0xFFFFF).to(gl.int32) * C.K_SPLIT
    partial = (word >> 44).to(gl.int32) * C.K_SPLIT
    pieces = full + partial
    steps = gl.maximum((pieces + C.PIECES - 1) // C.PIECES, 1)
    first = pieces - (steps - 1) * C.PIECES
    masked = 1 + (gl.maximum(partial - first, 0) + C.PIECES - 1) // C.PIECES
    return pieces, steps, first, masked


@gluon.jit
def counts_of(tile, full_count_ptr, partial_count_ptr, count_strides, rows, kv_heads, group, heads_per_mask, C):
    """Full and partial blocks of a tile's row."""
    b, h, h_key, row = place_of(tile, rows, kv_heads, group)
    at = (
        b.to(gl.int64) * count_strides[0]
        + (h // heads_per_mask).to(gl.int64) * count_strides[1]
        + row // C.Q_SPLIT
    )
    return gl.load(full_count_ptr + at), gl.load(partial_count_ptr + at)


@gluon.jit
def word_of(tile, tiles, full, partial):
    """A tile and the counts of its row in 64 bits; -1 after the last tile.

    One word, because Triton 3.6 drops a value that a loop carries only to bound an inner loop.
    """
    word = tile.to(gl.int64) | (full.to(gl.int64) << 24) | (partial.to(gl.int64) << 44)
    return gl.where(tile < tiles, word, -1)


@gluon.jit
def read(words, slot, NUM_WARPS: gl.constexpr):
    return gl.max(words.index(slot).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@gluon.jit
def make_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_rings(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers of two tiles of queries, and of the stages of keys and of values: what is full, and what is empty."""
    q_full = make_barriers(2, 1)
    q_empty = make_barriers(2, CONSUMERS + 1)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    return q_full, q_empty, k_full, k_empty, v_full, v_empty

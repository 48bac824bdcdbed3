"""The persistent tile scheduler of the kernels for Hopper: work items, their coordinates, and rings of barriers.

Terms that these kernels share:

    * `tile of queries`: what a program computes at a time: 64 queries for each of its consumers, all of one head and of one
      row of blocks. Such tiles are numbered across the launch, and the scheduler, a counter in global memory, hands the
      numbers out.
    * `row`: in the kernels, the number of a tile of queries within its head; `row // Q_SPLIT` is the row of the mask's
      blocks whose list it uses.
    * `tile of keys`: the `BLOCK_N` keys that one step of a consumer computes.
    * `piece`: a run of `min(k_block, BLOCK_N)` slots of one block. A block wider than `BLOCK_N` has `K_SPLIT` pieces, each
      a tile of keys. Of narrower blocks `PIECES` fill one tile of keys, and they may come from anywhere.
    * `stage`: one of `STAGES` buffers in shared memory, for one tile of keys, or of values.

A row's list names its full blocks first, then its partial blocks, which are masked. It is walked from its end, so that
the masked steps come first. Step 0 is always masked: if the number of pieces is not a multiple of `PIECES`, it is the
step with fewer. Whether a later step is masked follows from the counts of blocks alone (`extent`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocksparse.kernels.hopper.arguments import Barriers

LOADER_REGISTERS = gl.constexpr(24)  # of each thread of a loading warp, once registers are reallocated

# Arguments that change with the prompt's length, and that Triton must not specialise on: else it would compile again
# when an integer is 1 or a multiple of 16, or when a pointer (that of the counts of some heads) happens to be aligned.
# Entries of a tuple are always specialised on; strides of positions may be, for they count whole blocks.
OF_PROMPT = [
    *("full_count_ptr", "partial_count_ptr", "tiles", "N", "cols", "rows", "offset"),
    *(f"{name}_stride_{axis}" for name in ("count", "index", "lse") for axis in "bh"),
]


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a positive scale that give the same logits.

    The kernels for Hopper take the maximum of unscaled scores, which is that of the logits only if the scale is positive.
    """
    if scale > 0:
        return q, scale
    return (torch.zeros_like(q), 1.0) if scale == 0 else (-q, -scale)


def registers(consumers: int, per_sm: int) -> int:
    """Registers of each thread at launch, a multiple of 8: an equal share of the 65536 of a multiprocessor.

    Registers are reallocated by groups of four warps: each consumer is one, and one more holds the two loading warps.
    """
    return 65536 // (per_sm * (consumers + 1) * 128) // 8 * 8


def consumer_registers(consumers: int, per_sm: int, of_loaders: int = LOADER_REGISTERS.value) -> int:
    """Registers of each thread of a consumer, a multiple of 8, once loaders have given back all but `of_loaders`."""
    return (registers(consumers, per_sm) * (consumers + 1) - of_loaders) // consumers // 8 * 8


@gluon.jit
def tile_coords(item, rows, kv_heads, group):
    """Batch entry, query head, KV head and row of a tile of queries, from its number or from its work item.

    Numbers run through one KV head after the other. Within a KV head they run through the rows, the last one first, and
    within a row through the `group` query heads that share the KV head.
    """
    tile = (item & 0xFFFFFF).to(gl.int32)
    per_key = rows * group
    key = tile // per_key
    within = tile % per_key
    h_key = key % kv_heads
    return key // kv_heads, h_key * group + within % group, h_key, rows - 1 - within // group


@gluon.jit
def pack_coords(b, h, h_key, row):
    """The coordinates of a tile of queries in an int64.

        * bits 0 to 15: row, the number of the tile of queries in its head
        * bits 16 to 31: KV head
        * bits 32 to 47: query head
        * bits 48 to 63: batch entry, below 2^15, for the shift that unpacks it copies the sign

    Only `load_keys` works it out, since `tile_coords` divides, and hands it to the other warps.
    """
    return (b.to(gl.int64) << 48) | (h.to(gl.int64) << 32) | (h_key.to(gl.int64) << 16) | row


@gluon.jit
def unpack_coords(coords):
    """Batch entry, query head, KV head and row of a `pack_coords`."""
    return (
        (coords >> 48).to(gl.int32), ((coords >> 32) & 0xFFFF).to(gl.int32), ((coords >> 16) & 0xFFFF).to(gl.int32),
        (coords & 0xFFFF).to(gl.int32),
    )  # fmt: skip


@gluon.jit
def list_extent(item, C):
    """The pieces and steps of a row's list, from the counts in the work item (`pack_item`).

    Returns four numbers. The first is the number of pieces in the list. The second is the number of steps, that of its tiles
    of keys and at least 1. The third is the number of pieces in step 0, from 1 to `PIECES` unless the list is empty. The
    last is the number of masked steps: step 0, and as many as the partial blocks need beyond it. The item -1 counts as one
    of an empty list.
    """
    item = gl.maximum(item, 0)
    full = ((item >> 24) & 0xFFFFF).to(gl.int32) * C.K_SPLIT
    partial = (item >> 44).to(gl.int32) * C.K_SPLIT
    pieces = full + partial
    steps = gl.maximum((pieces + C.PIECES - 1) // C.PIECES, 1)
    first = pieces - (steps - 1) * C.PIECES
    masked = 1 + (gl.maximum(partial - first, 0) + C.PIECES - 1) // C.PIECES
    return pieces, steps, first, masked


@gluon.jit
def first_block(item, C):
    """Where in its row's list the work begins: at block 0, or with `SPLIT_KV` where the item's lowest 24 bits say."""
    block = 0
    if C.SPLIT_KV:
        block = (gl.maximum(item, 0) & 0xFFFFFF).to(gl.int32)
    return block


@gluon.jit
def counts_of(tile, given, C):
    """Numbers of full and of partial blocks in the list of a tile of queries."""
    sizes, strides = given.sizes, given.strides.counts
    b, h, h_key, row = tile_coords(tile, sizes.rows, sizes.kv_heads, sizes.group)
    at = b.to(gl.int64) * strides[0] + (h // sizes.heads_per_mask).to(gl.int64) * strides[1] + row // C.Q_SPLIT
    return gl.load(given.pointers.full_count + at), gl.load(given.pointers.partial_count + at)


@gluon.jit
def pack_item(tile, tiles, full, partial):
    """A packed work item: the number of a tile of queries and the counts of its row in one int64; -1 after the last tile.

        * bits 0 to 23: number of the tile of queries
        * bits 24 to 43: full blocks in its row's list
        * bits 44 to 63: partial blocks, below 2^19: the sign bit stays 0, so that only -1 is negative

    Where lists are split, items come from the work list instead, and bits 0 to 23 name a block (`hopper/split_kv.py`).
    `HopperTiles.too_many` refuses what does not fit. It is one number, because Triton 3.6 drops a value that a loop
    carries only to bound an inner loop.
    """
    item = tile.to(gl.int64) | (full.to(gl.int64) << 24) | (partial.to(gl.int64) << 44)
    return gl.where(tile < tiles, item, -1)


@gluon.jit
def read(numbers, i, NUM_WARPS: gl.constexpr):
    """`numbers[i]` in shared memory as a scalar of every thread of `NUM_WARPS` warps."""
    return gl.max(numbers.index(i).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@gluon.jit
def make_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """`N` barriers in shared memory; a phase of each ends after `COUNT` arrivals, and after the bytes it expects."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_rings(C):
    """Pairs of barriers, full and empty, of three rings of buffers: `Q_BUFFERS` of queries, `STAGES` of keys and of values.

    A loading warp waits for the empty barrier of a buffer, and starts bulk copies that report their bytes to its full
    barrier. It tells the full barrier once how many bytes to expect, which is also its one arrival. A reader waits for the
    full barrier, and arrives at the empty one when it has read everything that the buffer holds. Both consumers read every
    buffer. The warp that loads values reads the work items, which come with the queries: one arrival more.

    Use `i` of a ring of `n` buffers takes buffer `i % n`, in phase `i // n` of its barriers. To wait names the parity of a
    phase, and passes once that phase is over. So readers wait for `(i // n) & 1` of the full barrier. A loading warp waits
    for the phase before, `((i // n) & 1) ^ 1`, of the empty one. The first time this is the phase before the first one,
    which counts as over. One bit is enough: a buffer is refilled only after all readers gave it back, so no barrier is ever
    two phases ahead of a warp that waits for it.
    """
    q_full = make_barriers(C.Q_BUFFERS, 1)
    q_empty = make_barriers(C.Q_BUFFERS, C.CONSUMERS + 1)
    k_full = make_barriers(C.STAGES, 1)
    k_empty = make_barriers(C.STAGES, C.CONSUMERS)
    v_full = make_barriers(C.STAGES, 1)
    v_empty = make_barriers(C.STAGES, C.CONSUMERS)
    fence_async_shared()
    return Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)

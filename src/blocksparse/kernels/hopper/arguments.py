"""What the warps of the kernels over block lists get on Hopper: compile-time constants, and values by name.

`hopper/tile_scheduler.py` explains the terms. A field of None is compiled away.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of `Constants` as objects, not as strings.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse.kernels.common.names_triton import aggregate


@aggregate
class Constants:
    """Compile-time constants of a kernel. Constants in a plain tuple would turn into run-time values."""

    DQ: gl.constexpr  # head dim of queries and keys, padded to a multiple of 64 (`padded_keys`)
    DV: gl.constexpr  # head dim of values, padded to 64, 128 or 256 (`padded_values`)
    CONSUMERS: gl.constexpr  # warp groups that compute 64 queries each
    BLOCK_N: gl.constexpr  # keys in a tile of keys
    STAGES: gl.constexpr  # tiles of keys, and of values, in shared memory
    Q_BUFFERS: gl.constexpr  # tiles of queries in shared memory, 1 or 2
    # parts of the output's columns, 1 or 2, that leave through the same shared memory one after the other
    OUT_PARTS: gl.constexpr
    PIECES: gl.constexpr  # pieces that fill a tile of keys
    K_SPLIT: gl.constexpr  # pieces per block
    Q_SPLIT: gl.constexpr  # tiles of queries per row of blocks
    CAUSAL: gl.constexpr
    Q_IN_ORDER: gl.constexpr  # a query's position follows from its slot, and is not read
    K_IN_ORDER: gl.constexpr  # a key's position is its slot, and is not read
    QK8: gl.constexpr  # queries and keys are int8
    PV8: gl.constexpr  # weights and values are fp8; the values are then stored transposed
    SPLIT_KV: (
        gl.constexpr
    )  # the scheduler hands out entries of a work list (`hopper/split_kv.py`), not tiles of queries

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


class Descriptors(NamedTuple):
    """TMA descriptors; from `q_scale` on those that 8-bit operands need."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_scale: Any = None
    taken: Any = None  # what smoothing takes from the logits of each query
    k_token: Any = None
    v_token: Any = None
    k_tile: Any = None
    v_tile: Any = None


class Pointers(NamedTuple):
    full_count: Any
    partial_count: Any
    lists: Any
    q_position: Any
    k_position: Any
    counter: Any  # of the scheduler
    lse: Any
    work: Any = None  # the work list
    split_out: Any = None
    split_sums: Any = None
    pv_skip: Any = None


class Barriers(NamedTuple):
    """Rings of barriers (`make_rings`)."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Buffers(NamedTuple):
    """Shared memory, as the copy engine sees it; from `query_numbers` on what 8-bit operands need."""

    q: Any
    k: Any
    v: Any
    out: Any
    items: Any  # of each buffer of queries: work items, then coordinates, then split slots
    starts: Any  # the first slot of each piece
    query_numbers: Any = None
    token_numbers: Any = None
    tile_numbers: Any = None


class Strides(NamedTuple):
    """Of batch entries and heads."""

    counts: Any
    lists: Any
    q_position: Any
    k_position: Any
    lse: Any


class Sizes(NamedTuple):
    tiles: Any  # tiles of queries in the launch, or entries of the work list
    M: Any
    N: Any
    cols: Any
    rows: Any  # tiles of queries in a head
    kv_heads: Any
    group: Any  # query heads that share a KV head
    heads_per_mask: Any
    offset: Any  # the position of the first query
    scale: Any  # in base 2


class LogitChanges(NamedTuple):
    """What a layer does to logits; `cap` and `reference` are those of `hopper/softmax.py`."""

    window: Any
    cap: Any
    reference: Any
    sinks: Any


class Inputs(NamedTuple):
    """All that a warp gets."""

    descriptors: Descriptors
    pointers: Pointers
    barriers: Barriers
    buffers: Buffers
    strides: Strides
    sizes: Sizes

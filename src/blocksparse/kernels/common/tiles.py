"""Kernel choice and tile sizes for attention over block lists."""

from __future__ import annotations

import functools

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import flag, one_of, size, whole
from blocksparse.kernels.common.hardware import (
    INTERPRETER,
    TARGETS,
    Hardware,
    fitted,
    hardware_of,
    is_hopper,
    of_attention,
)
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, padded_keys, padded_values, power_of_2

_SHARED = TARGETS["sm_90"].shared_per_sm
_BUFFERS = (2, 1), (1, 1), (1, 2)  # buffers of queries, and parts in which the output leaves, from the best on
HALF = (torch.float16, torch.bfloat16)

MOST_SOFTCAP = 100.0
"""The greatest softcap that the Hopper kernel takes: its tanh may move a logit by 2^-11 of the softcap."""


@frozen
class TritonTiles:
    """Launch settings of the portable kernel.

    Args:
        block_m: queries in a tile. A power of two, at least 16, that divides the mask's query block.
        block_n: keys in a tile. A power of two, at least 16, that divides the mask's key block.
        num_warps: warps per program.
        num_stages: tiles of keys and of values whose loads are in flight at a time.
        tma: load keys and values through tensor descriptors. The hardware and the tensors must allow it.
    """

    block_m: int = field(converter=whole, validator=size)
    block_n: int = field(converter=whole, validator=size)
    num_warps: int = field(converter=whole, validator=one_of(1, 2, 4, 8, 16, 32))
    num_stages: int = field(converter=whole, validator=size)
    tma: bool = field(default=True, validator=flag)

    kernel = "triton"

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int) -> list[str]:
        """Reasons against these tiles: both must be powers of two, at least 16, that divide the mask's blocks."""
        fits = all(
            tile >= 16 and tile & (tile - 1) == 0 and block % tile == 0
            for tile, block in ((self.block_m, q_block), (self.block_n, k_block))
        )
        return [] if fits else [f"{self} does not divide blocks of {q_block} x {k_block}"]


@frozen
class HopperTiles:
    """Launch settings of a Hopper kernel.

    The kernel of `TritonExecutor` takes half precision and head dims that are multiples of 8 up to 256;
    `Int8Executor` says what its own kernel takes.

    Args:
        consumers: warp groups that compute, 1 or 2. Each computes 64 queries of a tile of queries.
        block_n: keys in a tile of keys, 64 or 128. Several narrower blocks share one tile. With `Int8Executor`
            only two blocks of 64 keys can.
        num_stages: tiles of keys that shared memory holds at a time. As many of values.
        per_sm: programs that run on a multiprocessor at a time.
    """

    consumers: int = field(converter=whole, validator=one_of(1, 2))
    block_n: int = field(converter=whole, validator=one_of(64, 128))
    num_stages: int = field(converter=whole, validator=size)
    per_sm: int = field(default=1, converter=whole, validator=size)

    kernel = "hopper"

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int) -> list[str]:
        """Reasons against these tiles, from what the bulk copy engine and the consumers' registers require."""
        reasons = []
        if not is_hopper(q.device):
            reasons.append(f"{self} needs a GPU of compute capability 9.0")
        if q.dtype not in HALF:
            reasons.append(f"{self} takes float16 and bfloat16, not {q.dtype}")
        reasons += _against_head_dims(self, q.shape[-1], v.shape[-1])
        if q_block % (64 * self.consumers) or (
            k_block % self.block_n and (self.block_n % k_block or k_block < 16)
        ):
            reasons.append(f"{self} does not divide blocks of {q_block} x {k_block}")
        return reasons + self.too_many(q, q_block, cdiv(k.shape[2], k_block))

    def too_large(self, D: int, Dv: int, *, qk_bytes: int = 2, pv_bytes: int = 2) -> list[str]:
        """A reason if `per_sm` programs need more shared memory than a multiprocessor has.

        An entry of queries and keys has `qk_bytes` bytes, one of values `pv_bytes`.
        """
        buffers = _BUFFERS[0] if qk_bytes == 1 else _buffers(self, D, Dv)
        needed = self.needed(D, Dv, *buffers, qk_bytes, pv_bytes)
        if needed <= _SHARED:
            return []
        return [f"{self} needs {-(-needed >> 10)} KiB of shared memory, and there are {_SHARED >> 10}"]

    def buffers(self, D: int, Dv: int) -> dict[str, int]:
        """Compile-time constants of `TritonExecutor`'s kernel, without the fields of these tiles
        (`hopper/tile_scheduler.py`).

        With two buffers of queries, the next ones are loaded while these are used; in one part, the output leaves
        at once. Where that does not fit, a consumer waits at the end of a tile of queries.
        """
        q_buffers, out_parts = _buffers(self, D, Dv)
        return {"Q_BUFFERS": q_buffers, "OUT_PARTS": out_parts}

    def needed(self, D: int, Dv: int, q_buffers: int, out_parts: int, qk_bytes: int, pv_bytes: int) -> int:
        """Bytes of shared memory of `per_sm` programs.

        Each holds the buffers of queries, `num_stages` tiles of keys and as many of values, with padded head dims.
        It also holds a part of a tile of output, 2 bytes a number. With 8-bit operands their scales come on top.
        Barriers, work items and what CUDA reserves take 1280 bytes.
        """
        of_keys, of_values = padded_keys(D), padded_values(Dv)
        queries, keys = 64 * self.consumers, self.num_stages * self.block_n
        needed = qk_bytes * of_keys * (q_buffers * queries + keys) + pv_bytes * of_values * keys
        needed += 2 * queries * of_values // out_parts
        # What comes with 8-bit operands (`int8_attention_hopper.py`), in fp32: two numbers for each query, in each
        # of the two buffers; three for each key in flight; and in each stage, for each of up to two pieces (blocks
        # of 64 keys that share a tile of keys), two runs of 128 bytes: scales of keys, and of values.
        needed += (16 * queries + 12 * keys + 512 * self.num_stages) * (qk_bytes == 1)
        return self.per_sm * (needed + 1280)

    def too_many(self, q: Tensor, q_block: int, cols: int) -> list[str]:
        """A reason if a count does not fit the bits that `hopper/tile_scheduler.py` has for it.

        A work item (`pack_item`) is an int64. It has 24 bits for the number of a tile of queries among all `B * Hq
        * rows`. Then come 20 bits for the number of full blocks in a row's list, and 20 for partial blocks. The
        sign bit must stay 0, because -1 marks the end of the work, so partial blocks have 19 bits. All `cols` key
        blocks of a row may be partial, so `cols < 2^19`. A second int64, the tile's coordinates (`pack_coords`),
        has 16 bits each for batch entry, query head, KV head and the tile's number in its head. The batch entry
        stands at the top, where the sign bit must stay 0, and so has 15.
        """
        if cols >= 2**19:
            return [f"{self} takes rows of up to {2**19 - 1} key blocks, not {cols}"]
        B, Hq, M, _ = q.shape
        tile = 64 * self.consumers
        rows = (M // q_block + 2) * max(q_block // tile, 1)  # at most; a chunk may start inside a block
        if B <= 2**15 and max(Hq, rows) <= 2**16 and B * Hq * rows <= 2**24:
            return []
        return [
            f"{self} takes up to {2**15} prompts, {2**16} heads, {2**16} tiles of {tile} queries in each and "
            f"{2**24} in all, not {B}, {Hq}, {rows} and {B * Hq * rows}"
        ]


# What head dims and tiles alone decide is remembered, because every call asks for it.
@functools.lru_cache(maxsize=REMEMBERED)
def _against_head_dims(tiles: HopperTiles, D: int, Dv: int) -> tuple[str, ...]:
    """Reasons against `tiles` for these head dims."""
    reasons = []
    if any(head_dim > 256 or head_dim % 8 for head_dim in (D, Dv)):
        reasons.append(f"{tiles} takes head dims that are multiples of 8 up to 256, not {D}, {Dv}")
    reasons += tiles.too_large(D, Dv)
    # A thread of a consumer holds 1/128 of 64 sums per channel of values. The compiler wants room for those at
    # launch, and for about 30 other registers, although consumers get more later.
    least, share = padded_values(Dv) // 2 + 32, 65536 // (tiles.per_sm * (tiles.consumers + 1) * 128)
    if share < least:
        reasons.append(f"{tiles} has {share} registers a thread, and head dim {Dv} needs {least}")
    return tuple(reasons)


@functools.lru_cache(maxsize=REMEMBERED)
def _buffers(tiles: HopperTiles, D: int, Dv: int) -> tuple[int, int]:
    """Buffers of queries and parts of the output: the first that fit, else the smallest."""
    possible = [(n, parts) for n, parts in _BUFFERS if padded_values(Dv) // parts >= 64]
    fitting = (pair for pair in possible if tiles.needed(D, Dv, *pair, 2, 2) <= _SHARED)
    return next(fitting, possible[-1])


Tiles = TritonTiles | HopperTiles

# By the largest head dims of keys and of values that an entry serves: tiles where 128 divides the query block, so
# that a tile of two consumers lies in one row of blocks, and where it does not. `python -m benchmarks.tune`
# measures candidates.
_HOPPER = {
    (64, 64): (HopperTiles(2, 128, 4), HopperTiles(1, 128, 2, 2)),
    (128, 128): (HopperTiles(2, 128, 2), HopperTiles(1, 64, 2, 2)),
    (192, 128): (HopperTiles(2, 128, 2), HopperTiles(1, 64, 1, 2)),
    (256, 256): (HopperTiles(2, 64, 2), HopperTiles(1, 64, 2)),
}


def tuned(q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int, *, plain: bool = True) -> Tiles:
    """The fastest tiles for blocks of `q_block` x `k_block`, as measured (docs/evidence/block-sizes.md).

    Args:
        plain: whether nothing is approximated, and no softcap is above `MOST_SOFTCAP`. Only then is the Hopper
            kernel taken.
    """
    D, Dv = q.shape[-1], v.shape[-1]
    serving = (pair for (of_keys, of_values), pair in _HOPPER.items() if of_keys >= D and of_values >= Dv)
    if plain and (pair := next(serving, None)):
        tiles = pair[q_block % 128 > 0]
        if not tiles.unsupported(q, k, v, q_block, k_block):
            return tiles
    return portable(q_block, k_block, max(D, Dv), q.element_size(), hardware_of(q))


def tuned_int8(head_dim: int, q_block: int, k_block: int, fp8_pv: bool) -> HopperTiles:
    """The fastest tiles for 8-bit operands, as measured; two blocks of 64 keys share a tile of 128 keys."""
    if q_block % 128:
        return HopperTiles(1, 64, 3 if fp8_pv else 2, 2)
    block_n = 64 if k_block % 128 and k_block > 64 else 128
    return HopperTiles(2, block_n, 4 if fp8_pv or head_dim <= 64 else 2)


# The largest tiles for which a thread has registers enough, by the padded head dim: queries, keys, warps, stages.
# The first whose queries divide the block is taken. They are chosen by what the compiler reports and by a model
# (docs/evidence/tiles.md), for GPUs that were not there: none of these is measured.
_Tables = dict[int, tuple[tuple[int, int, int, int], ...]]
_MMA: _Tables = {
    64: ((64, 32, 4, 2),),
    128: ((128, 32, 8, 2), (64, 32, 4, 2)),
    256: ((64, 32, 8, 2), (32, 32, 4, 2)),
}
_CDNA: _Tables = {64: ((128, 32, 4, 2), (64, 32, 4, 1)), 128: ((64, 32, 4, 1),), 256: ((64, 32, 4, 1),)}
_RDNA_3: _Tables = {64: ((64, 32, 4, 1),), 128: ((16, 16, 4, 1),), 256: ((32, 16, 8, 1),)}
_RDNA_4: _Tables = {64: ((64, 32, 4, 1),), 128: ((32, 16, 8, 1),), 256: ((32, 16, 8, 1),)}
_FP32: _Tables = {64: ((64, 32, 4, 2),), 128: ((32, 32, 4, 2),), 256: ((32, 32, 4, 2),)}
_RDNA_FP32: _Tables = {64: ((32, 16, 4, 1),), 128: ((16, 16, 4, 1),), 256: ((16, 16, 4, 1),)}


@functools.lru_cache(maxsize=REMEMBERED)
def portable(
    q_block: int,
    k_block: int,
    head_dim: int,
    itemsize: int,
    hardware: Hardware,
    *,
    value_bytes: int | None = None,
    out_bytes: int | None = None,
) -> TritonTiles:
    """The largest tiles for the portable kernel that divide the blocks and fit on chip.

    An entry of queries and keys has `itemsize` bytes. One of values has `value_bytes`, by default as many. One of
    the output has `out_bytes`, by default as many as one of values.
    """
    padded, value_bytes = max(power_of_2(head_dim), 32), value_bytes or itemsize
    out_bytes = out_bytes or value_bytes
    block_m, block_n, warps, stages = _largest(q_block, head_dim, itemsize, hardware)
    block_m, block_n = min(q_block & -q_block, block_m), min(k_block & -k_block, block_n)
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}

    def needs(options: dict[str, int]) -> int:
        rows = padded * itemsize, padded * value_bytes
        return of_attention(hardware, options, *rows, value_bytes, padded * out_bytes)

    options = fitted(options, needs, hardware)
    return TritonTiles(options["BLOCK_M"], options["BLOCK_N"], options["num_warps"], options["num_stages"])


def _largest(q_block: int, head_dim: int, itemsize: int, hardware: Hardware) -> tuple[int, int, int, int]:
    """Queries and keys of the largest tiles, their warps and stages."""
    if hardware.multiplies_from_shared or hardware == INTERPRETER:
        row_bytes = head_dim * itemsize
        large = itemsize <= 2 and 128 < row_bytes <= 256 and (hardware.is_hopper or head_dim <= 128)
        limit = 128 if large else 64 if row_bytes <= (512 if itemsize <= 2 else 256) else 32
        # With 4 warps some forms of the kernel spill; on Hopper no other tiles were measured.
        wide = itemsize <= 2 and head_dim > 128 and q_block % 64 == 0 and hardware.capability[0] in (10, 11)
        return limit, limit, 8 if wide or (large and q_block % 128 == 0) else 4, 2
    if itemsize == 4:
        table = _RDNA_FP32 if hardware.is_rdna else _FP32
    elif hardware.is_rdna:
        table = _RDNA_3 if hardware.name.startswith("gfx11") else _RDNA_4
    else:
        table = _MMA if hardware.is_nvidia else _CDNA
    choices = table[max(power_of_2(head_dim), 64)]
    block_m, block_n, warps, stages = next((x for x in choices if q_block % x[0] == 0), choices[-1])
    return block_m, block_n, warps, stages

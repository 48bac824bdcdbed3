"""Which kernel attends over block lists, and with which tiles."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.validators import flag, one_of, size, whole

_SHARED = 228 << 10  # bytes of a Hopper multiprocessor
HALF = (torch.float16, torch.bfloat16)


@frozen
class TritonTiles:
    """How the portable kernel is launched.

    Args:
        block_m: queries per tile, a power of two from 16 on that divides the mask's query block.
        block_n: keys per tile, the same for the key block.
        num_warps: warps per program.
        num_stages: tiles of keys and values in flight.
        tma: load them through tensor descriptors, where the hardware and the tensors allow it.
    """

    block_m: int = field(converter=whole, validator=size)
    block_n: int = field(converter=whole, validator=size)
    num_warps: int = field(converter=whole, validator=one_of(1, 2, 4, 8, 16, 32))
    num_stages: int = field(converter=whole, validator=size)
    tma: bool = field(default=True, validator=flag)

    kernel = "triton"

    @property
    def sizes(self) -> list[int]:
        """What the op takes."""
        return [self.block_m, self.block_n, self.num_warps, self.num_stages, int(self.tma)]

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int) -> list[str]:
        """Tiles are powers of two, at least 16, that divide the mask's blocks."""
        fits = all(
            tile >= 16 and tile & (tile - 1) == 0 and block % tile == 0
            for tile, block in ((self.block_m, q_block), (self.block_n, k_block))
        )
        return [] if fits else [f"{self} does not divide blocks of {q_block} x {k_block}"]


@frozen
class HopperTiles:
    """How a kernel for Hopper is launched.

    `TritonExecutor`'s takes half precision and head dims that are multiples of 8 up to 128; `Int8Executor` says
    what its own takes.

    Args:
        consumers: warp groups that compute, with 64 queries each: 1 or 2.
        block_n: keys per tile, 64 or 128; narrower blocks fill it together, of `Int8Executor` two of 64.
        num_stages: tiles of keys, and of values, in flight.
        per_sm: programs per multiprocessor.
    """

    consumers: int = field(converter=whole, validator=one_of(1, 2))
    block_n: int = field(converter=whole, validator=one_of(64, 128))
    num_stages: int = field(converter=whole, validator=size)
    per_sm: int = field(default=1, converter=whole, validator=size)

    kernel = "hopper"

    @property
    def sizes(self) -> list[int]:
        """What the op takes."""
        return [self.consumers, self.block_n, self.num_stages, self.per_sm]

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int) -> list[str]:
        """What the copy engine and the consumers' registers ask for."""
        reasons = []
        if not is_hopper(q.device):
            reasons.append(f"{self} needs a GPU of compute capability 9.0")
        if q.dtype not in HALF:
            reasons.append(f"{self} takes float16 and bfloat16, not {q.dtype}")
        if any(x.shape[-1] > 128 or x.shape[-1] % 8 for x in (q, v)):
            reasons.append(
                f"{self} takes head dims that are multiples of 8 up to 128, not {q.shape[-1]}, {v.shape[-1]}"
            )
        if q_block % (64 * self.consumers) or (
            k_block % self.block_n and (self.block_n % k_block or k_block < 16)
        ):
            reasons.append(f"{self} does not divide blocks of {q_block} x {k_block}")
        reasons += self.too_large(q.shape[-1], v.shape[-1])
        return reasons + self.too_many(q, q_block, cdiv(k.shape[2], k_block))

    def too_large(self, D: int, Dv: int, *, qk_bytes: int = 2, pv_bytes: int = 2) -> list[str]:
        """Of a program: two buffers of queries, the stages, the output, scales, barriers, what CUDA reserves."""
        of_keys, of_values = (64 if x <= 64 else 128 for x in (D, Dv))
        queries, keys = 64 * self.consumers, self.num_stages * self.block_n
        needed = qk_bytes * of_keys * (2 * queries + keys) + pv_bytes * of_values * keys + 2 * queries * of_values
        # Two numbers a query, twice; three a key; two runs of 128 bytes for each of up to two pieces.
        needed += (16 * queries + 12 * keys + 512 * self.num_stages) * (qk_bytes == 1)
        if (needed := self.per_sm * (needed + 1280)) <= _SHARED:
            return []
        return [f"{self} needs {-(-needed >> 10)} KiB of shared memory, and there are {_SHARED >> 10}"]

    def too_many(self, q: Tensor, q_block: int, cols: int) -> list[str]:
        """The queue has 24 bits for the number of a tile of queries, and 15 or 16 for each part of its place.

        It has 19 for the number of key blocks in a row.
        """
        if cols >= 2**19:
            return [f"{self} takes rows of up to {2**19 - 1} key blocks, not {cols}"]
        B, Hq, M, _ = q.shape
        tile = 64 * self.consumers
        rows = (M // q_block + 2) * max(q_block // tile, 1)  # or one less: a chunk may start inside a block
        if B <= 2**15 and max(Hq, rows) <= 2**16 and B * Hq * rows <= 2**24:
            return []
        return [
            f"{self} takes up to {2**15} prompts, {2**16} heads, {2**16} tiles of {tile} queries in each and "
            f"{2**24} in all, not {B}, {Hq}, {rows} and {B * Hq * rows}"
        ]


Tiles = TritonTiles | HopperTiles

# By head dim (up to) and whether 128 queries fill whole rows; `python -m benchmarks.tune` measures candidates.
_HOPPER = {
    (64, True): HopperTiles(2, 128, 4),
    (64, False): HopperTiles(1, 128, 2, 2),
    (128, True): HopperTiles(2, 128, 2),
    (128, False): HopperTiles(1, 64, 2, 2),
}


def tuned(q: Tensor, k: Tensor, v: Tensor, q_block: int, k_block: int, *, exact: bool = True) -> Tiles:
    """The fastest tiles for blocks of `q_block` x `k_block`, as measured (docs/performance.md).

    Args:
        exact: nothing is approximated; the Hopper kernel only computes exactly.
    """
    head_dim = max(q.shape[-1], v.shape[-1])
    if exact and head_dim <= 128:
        tiles = _HOPPER[64 if head_dim <= 64 else 128, q_block % 128 == 0]
        if not tiles.unsupported(q, k, v, q_block, k_block):
            return tiles
    return portable(q_block, k_block, head_dim, q.element_size())


def tuned_int8(head_dim: int, q_block: int, k_block: int, fp8_pv: bool) -> HopperTiles:
    """The fastest tiles of 8-bit operands, as measured; two blocks of 64 keys make one tile."""
    if q_block % 128:
        return HopperTiles(1, 64, 3 if fp8_pv else 2, 2)
    block_n = 64 if k_block % 128 and k_block > 64 else 128
    return HopperTiles(2, block_n, 4 if fp8_pv or head_dim <= 64 else 2)


def portable(q_block: int, k_block: int, head_dim: int, itemsize: int) -> TritonTiles:
    """Tiles of the portable kernel that divide the blocks and fit on chip."""
    row_bytes = head_dim * itemsize
    large = itemsize <= 2 and 128 < row_bytes <= 256
    limit = 128 if large else 64 if row_bytes <= 512 else 32
    block_m, block_n = (min(block & -block, limit) for block in (q_block, k_block))
    return TritonTiles(block_m, block_n, num_warps=8 if block_m == 128 else 4, num_stages=2)

"""The Triton kernels of `probe_sums`: fp16, bf16 and fp32.

A tile has the logits of all queries of the probe with one block of keys. Its distances lie in up to three bands. Row `r` and
column `c` of the tile are in part 0 if `c >= r + offset`, in part 2 if `c < r + offset - RUN`, else in part 1. For each
query a tile stores its maximum, and the sums of its weights relative to it in each part. A second launch joins them. No sum
depends on which program comes first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import joined, rows_of
from blocksparse.kernels.common.dispatch import FLOATS
from blocksparse.kernels.common.hardware import Hardware, hardware_of, needed
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, power_of_2
from blocksparse.launch.launches import remembered

_TILES = 8  # tiles of keys that a program takes one behind another
_JOINED = 8  # blocks, and bands, of a program of the second launch


def takes(probe: Tensor, run: int) -> bool:
    """Whether the kernels compute in the precision of the probe, and a program can hold all of its queries."""
    P, D, itemsize = probe.shape[2], probe.shape[3], probe.element_size()
    if run > 128 or power_of_2(run) != run or run < P or D * itemsize > 512 or probe.dtype not in FLOATS:
        return False
    hardware = hardware_of(probe)
    options = launch_options(P, D, itemsize, run, hardware)
    return shared_memory(hardware, options, D, itemsize) <= hardware.shared


@functools.lru_cache(maxsize=REMEMBERED)
def launch_options(P: int, head_dim: int, itemsize: int, run: int, hardware: Hardware) -> dict[str, int]:
    """The tile of all queries and a block of keys; fewer steps of loads are in flight where memory is small."""
    options = {
        "BLOCK_M": max(16, power_of_2(P)),
        "BLOCK_N": run,
        "num_warps": 8 if run > 64 else 4,
        "num_stages": 2,
    }
    if hardware.multiplies_from_shared and itemsize == 2 and head_dim <= 128 and run > 64:
        # Two programs share a multiprocessor: one computes exponentials while the other multiplies.
        options["maxnreg"] = 128
    if shared_memory(hardware, options, head_dim, itemsize) > hardware.shared:
        options["num_stages"] = 1
    return options


def shared_memory(hardware: Hardware, options: dict[str, int], head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory of a program, at most."""
    row_bytes = max(16, power_of_2(head_dim)) * itemsize
    M, N = options["BLOCK_M"], options["BLOCK_N"]
    return needed(
        hardware,
        held=M * row_bytes,
        loaded=(N * row_bytes,),
        stages=options["num_stages"],
        between=M * 64,
        single=itemsize == 4,
    )


def probe_sums_triton(probe: Tensor, k: Tensor, scale: float, run: int) -> tuple[Tensor, Tensor]:
    """Launch the kernels; arguments as in `probe_sums`."""
    (B, Hq, P, D), (_, H, N, _) = probe.shape, k.shape
    probe, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (probe, k))
    first = N - P  # position of the first probe query
    band, offset = divmod(first + 1, run)
    parts = 3 if offset + P > run + 1 else 2
    tiles, rows = cdiv(N, run), max(16, power_of_2(P))
    programs = cdiv(tiles, _TILES)
    new: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    log_sum = torch.empty((B, Hq, programs, rows), **new)
    of_tiles = torch.empty((B, Hq, tiles, parts + 1, rows), **new)  # the maximum, then the sum of each part
    columns, bands = (torch.empty((B, Hq, tiles), **new) for _ in range(2))
    options = launch_options(P, D, k.element_size(), run, hardware_of(k))
    _sums_of_tiles[(programs, Hq, B)](
        probe, k, log_sum, of_tiles, probe.stride()[:3], k.stride()[:3],
        P, N, first, offset, tiles, Hq // H, scale * math.log2(math.e),
        D=D, BLOCK_D=max(16, power_of_2(D)), ROWS=rows, KEYS=run, TILES=_TILES, PARTS=parts,
        **{name: value for name, value in options.items() if not name.startswith("BLOCK")},
    )  # fmt: skip
    _joined[(cdiv(tiles, _JOINED), Hq, B)](
        log_sum, of_tiles, columns, bands, P, programs, tiles, band,
        ROWS=rows, PARTS=parts, JOINED=_JOINED, num_warps=4,
    )  # fmt: skip
    return columns, bands


@remembered
@triton.jit(do_not_specialize=["P", "N", "first", "offset", "tiles"])
def _sums_of_tiles(
    q_ptr, k_ptr, log_sum_ptr, of_tiles_ptr, q_strides, k_strides, P, N, first, offset, tiles, heads_per_key, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Stores `[B, Hq, tiles, 1 + PARTS, ROWS]`, and the base-2 logarithm of each query's sum, `[B, Hq, programs, ROWS]`."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    row = tl.arange(0, ROWS)
    q_tile = rows_of(q_ptr, q_strides, b, h, row, row < P, D, BLOCK_D, False)
    each = tl.arange(0, KEYS)
    limit = row + offset
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    begin = tl.program_id(0) * TILES
    for tile in range(begin, tl.minimum(begin + TILES, tiles)):
        key = tile * KEYS + each
        k_tile = rows_of(k_ptr, k_strides, b, h // heads_per_key, key, key < N, D, BLOCK_D, False)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if tile * KEYS + KEYS > first + 1:  # some query does not see some key
            logits = tl.where(key[None, :] <= first + row[:, None], logits, float("-inf"))
        best = tl.max(logits, 1)
        weight = tl.exp2(logits - tl.where(best == float("-inf"), 0.0, best)[:, None])
        of_part = tl.where(each[None, :] >= limit[:, None], weight, 0.0)
        rest = weight - of_part  # either is the weight, and the other 0
        at = of_tiles_ptr + ((head * tiles + tile) * (PARTS + 1)) * ROWS + row
        tl.store(at, best)
        whole = tl.sum(of_part, 1)
        tl.store(at + ROWS, whole)
        if PARTS == 3:
            of_part = tl.where(each[None, :] < limit[:, None] - KEYS, weight, 0.0)
            rest = rest - of_part
            sums = tl.sum(of_part, 1)
            tl.store(at + 3 * ROWS, sums)
            whole += sums
        sums = tl.sum(rest, 1)
        tl.store(at + 2 * ROWS, sums)
        whole += sums
        new = tl.maximum(peak, best)
        origin = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(peak - origin) + whole * tl.exp2(best - origin)
        peak = new
    log_sum = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(log_sum_ptr + (head * tl.num_programs(0) + tl.program_id(0)) * ROWS + row, log_sum)


@remembered
@triton.jit(do_not_specialize=["P", "programs", "tiles", "band"])
def _joined(
    log_sum_ptr, of_tiles_ptr, columns_ptr, bands_ptr, P, programs, tiles, band,
    ROWS: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Stores the means over the queries of weights by block of keys, and by band of distances, `[B, Hq, tiles]`.

    Part `i` of tile `t` is of band `band - 1 - t + i`.
    """
    head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    total = joined(log_sum_ptr + head * programs * ROWS, programs, ROWS)
    each = tl.program_id(0) * JOINED + tl.arange(0, JOINED)
    at = of_tiles_ptr + head * tiles * (PARTS + 1) * ROWS
    of_columns = tl.zeros([JOINED], tl.float32)
    of_bands = tl.zeros([JOINED], tl.float32)
    for i in tl.static_range(PARTS):
        of_columns += _part(at, each, total, P, tiles, i, ROWS, PARTS)
        of_bands += _part(at, band - 1 + i - each, total, P, tiles, i, ROWS, PARTS)
    tl.store(columns_ptr + head * tiles + each, of_columns / P, mask=each < tiles)
    tl.store(bands_ptr + head * tiles + each, of_bands / P, mask=each < tiles)


@triton.jit
def _part(of_tiles_ptr, tile, total, P, tiles, PART: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sum over the queries of the weights in part `PART` of the tiles `tile`, `[len(tile)]`; 0 of tiles that are not there."""
    row = tl.arange(0, ROWS)[None, :]
    there = (tile >= 0) & (tile < tiles)
    mask = there[:, None] & (row < P)
    at = of_tiles_ptr + tile.to(tl.int64)[:, None] * (PARTS + 1) * ROWS + row
    best = tl.load(at, mask=mask, other=float("-inf"))
    sums = tl.load(at + (PART + 1) * ROWS, mask=mask, other=0.0)
    return tl.sum(sums * tl.exp2(best - total[None, :]), 1)

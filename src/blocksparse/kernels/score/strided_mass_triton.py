"""The Triton kernels of `strided_mass`: fp16, bf16 and fp32.

Another kernel runs first, that of `strided_products_triton.py`, or of `pooled_sums_triton.py` for cells of one slot. It leaves the best
logit of each query cell in each tile of key cells, and sums of weights over each block of the tile, relative to that logit.
The kernel here turns these into mass. Logits never leave the chip. Query cells are taken in bands of some rows of blocks, so
that the sums stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import evolve
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blocksparse.kernels.common.hardware import fp32_products
from blocksparse.kernels.common.sizes import cdiv, for_heads, power_of_2
from blocksparse.kernels.gemm.pooled_sums_triton import PooledTiles, pooled_tiles, sums_of_pooled
from blocksparse.kernels.gemm.products import StridedPooling, fillers
from blocksparse.kernels.gemm.strided_products_triton import (
    ProductTiles,
    can_use_tma,
    head_strides_of,
    sources_and_options,
    sums_of_tiles,
)
from blocksparse.kernels.score.strided_means_triton import edge_means_triton, strided_mean_triton
from blocksparse.launch.launches import remembered

_WORKSPACE = 2**28  # bytes of sums that are held at a time
_PROGRAMS = 2048  # that pooled tokens are shared out over, if there are enough tiles: some for each multiprocessor
_MANY = 32  # query cells of a row of blocks; where there are more, as single queries are, four warps add them all at once
_SUMS = 4096  # that these warps hold at a time
_COLS = 128  # blocks whose sums one warp holds otherwise
_UNROLLED = 4  # query cells whose sums it asks for at once
_SPAN = 16  # tiles of pooled keys that a program meets at most
_GROUP = 16  # tiles of query cells that meet a tile of key cells while it is in the L2 cache


def strided_mass_triton(
    q: Tensor,
    k: Tensor,
    of: StridedPooling,
    *,
    weight: float,
    floor: Tensor | None = None,
    factor: float = 1.0,
    tiles: ProductTiles | PooledTiles | None = None,
) -> Tensor:
    """Launch the kernels; arguments as in `strided_mass`. `tiles` are those that the device takes unless given."""
    if of.q_last is not None:
        given = {name: x for name in _POSITIONS if (x := getattr(of, name)) is not None}
        positions: dict[str, Any] = {name: for_heads(x, q.shape[1]) for name, x in given.items()}
        of = evolve(of, **positions)
    if of.slots == 1:
        launch, block_m, block_n = _pooled(q, k, of, tiles, weight)
    else:
        launch, block_m, block_n = _of_tokens(q, k, of, tiles, weight)

    (B, Hq, M, _), N = q.shape, k.shape[2]
    high, wide, first_cell = of.high, of.wide, of.first_cell
    q_cells, k_cells = cdiv(of.q_lead + M, of.slots), cdiv(N, of.slots)
    empty = first_cell % high
    rows, cols = cdiv(empty + q_cells, high), cdiv(k_cells, wide)
    if floor is not None:
        floor, rows = floor.contiguous(), floor.shape[2]
    mass = torch.empty((B, Hq, rows, cols), dtype=torch.float32, device=q.device)
    step = max(1, _WORKSPACE // (4 * B * Hq * high * cdiv(k_cells, block_n) * (block_n // wide)))
    step = max(1, step * high // block_m * block_m // high)
    most = min(step * high, q_cells), cdiv(k_cells, block_n)
    sums = torch.empty(B * Hq * most[0] * most[1] * (block_n // wide), dtype=torch.float32, device=q.device)
    peaks = torch.empty((2, B * Hq * most[0] * most[1]), dtype=torch.float32, device=q.device)
    padded_high = power_of_2(high)
    options = _options(padded_high, block_n, wide)
    for top in range(0, rows, step):
        bottom = min(top + step, rows)
        first, last = max(top * high - empty, 0), min(bottom * high - empty, q_cells)
        end = min((first_cell + last) * of.every, k_cells) if of.causal and of.q_last is None else k_cells
        k_tiles = cdiv(end, block_n)
        launch(sums, peaks[0], peaks[1], first, last, end, cdiv(last - first, block_m), k_tiles)
        _mass_of_rows[(bottom - top, Hq, B)](
            sums, peaks[0], peaks[1], mass, floor, factor,
            last - first, k_tiles, top, top * high - empty - first, rows, cols,
            first_cell + first if of.causal and of.q_last is None else None,
            HIGH=high, PADDED_HIGH=padded_high, TILE_COLS=block_n // wide, WIDE=wide,
            EVERY=of.every, JOINT=of.joint, **options,
        )  # fmt: skip
    return mass


def _options(high: int, block_n: int, wide: int) -> dict[str, int]:
    """Options of the second kernel, which no length decides: a cell has the same mass in a chunk as in the whole prompt."""
    if high > _MANY:
        sums = max(_SUMS * wide // (high * block_n), 1)
        return {"TILES": 16, "AT_A_TIME": sums, "UNROLLED": 0, "num_warps": 4}
    sums = max(_COLS * wide // block_n, 1)
    return {"TILES": min(512 // high, 64), "AT_A_TIME": sums, "UNROLLED": min(high, _UNROLLED), "num_warps": 1}


_POSITIONS = ("q_last", "k_first", "q_floor", "k_last")  # those of `StridedPooling`


def _of_tokens(
    q: Tensor, k: Tensor, of: StridedPooling, tiles: ProductTiles | PooledTiles | None, weight: float
) -> tuple[Callable[..., None], int, int]:
    """A launcher of the kernel over cells of tokens for a band, and the cells of queries and keys in a tile."""
    (_, Hq, M, D), (B, H, N, _) = q.shape, k.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_filler, k_filler = fillers(q, k, of, edge_means_triton)
    sources, options = sources_and_options(q, k, of, tiles if isinstance(tiles, ProductTiles) else None)

    def launch(
        sums: Tensor, peak: Tensor, total: Tensor, first: int, last: int, end: int, q_tiles: int, k_tiles: int
    ) -> None:
        sums_of_tiles[(q_tiles * (Hq // H) * k_tiles, H, B)](
            *sources, q, k, q_filler, k_filler, of.q_last, of.k_first, sums, peak, total,
            q.stride()[:3], k.stride()[:3], head_strides_of(of.q_last), head_strides_of(of.k_first),
            M, N, of.q_lead, first, last, of.first_cell, end, q_tiles, k_tiles, weight * math.log2(math.e), of.segment,
            D=D, SLOTS=of.slots, WIDE=of.wide, GROUP=_GROUP, CAUSAL=of.causal, FLIPPED=of.flipped, **options,
        )  # fmt: skip

    return launch, options["BLOCK_M"], options["BLOCK_N"]


def _pooled(
    q: Tensor, k: Tensor, of: StridedPooling, tiles: ProductTiles | PooledTiles | None, weight: float
) -> tuple[Callable[..., None], int, int]:
    """`_of_tokens` for cells of one slot."""
    (_, Hq, M, D), (B, H, N, _) = q.shape, k.shape
    # The mean of a cell of one token is the token: a copy that calls can repeat, as they cannot PyTorch's.
    q, k = (x if x.is_contiguous() else strided_mean_triton(x, 1, 0, False, None) for x in (q, k))
    tiles = tiles if isinstance(tiles, PooledTiles) else pooled_tiles(q, of.wide)
    assert tiles is not None, "plain torch takes these"
    block_m, block_n, block_d = tiles.block_m, tiles.block_n, max(power_of_2(D), 16)
    q_source, k_source = (
        TensorDescriptor.from_tensor(x.view(-1, D), [block, block_d]) if can_use_tma(q, k) else None
        for x, block in ((q, block_m), (k, block_n))
    )

    def launch(
        sums: Tensor, peak: Tensor, total: Tensor, first: int, last: int, end: int, q_tiles: int, k_tiles: int
    ) -> None:
        span = min(max(q_tiles * Hq * B * k_tiles // _PROGRAMS, 1), _SPAN)
        sums_of_pooled[(q_tiles * (Hq // H) * cdiv(k_tiles, span), H, B)](
            q_source, k_source, q, k, of.q_last, of.k_first, of.q_floor, of.k_last, sums, peak, total,
            head_strides_of(of.q_last), head_strides_of(of.k_first),
            M, N, first, last, of.first_cell, end, q_tiles, k_tiles, span, weight * math.log2(math.e), of.behind, of.segment,
            D=D, BLOCK_D=block_d, WIDE=of.wide, CAUSAL=of.causal, EVERY=of.every, PRECISION=fp32_products(),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    return launch, block_m, block_n


@remembered
@triton.jit(
    do_not_specialize=["peak_ptr", "total_ptr", "factor", "band", "k_tiles", "top", "before", "rows", "cols", "first_cell"]
)  # fmt: skip
def _mass_of_rows(
    sums_ptr, peak_ptr, total_ptr, mass_ptr, floor_ptr, factor,
    band, k_tiles, top, before, rows, cols, first_cell,
    HIGH: tl.constexpr, PADDED_HIGH: tl.constexpr, TILE_COLS: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr,
    AT_A_TIME: tl.constexpr, UNROLLED: tl.constexpr, EVERY: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Stores the mass of a row of blocks: sums over blocks, divided by each query cell's total, and added over its cells.

    With `JOINT` they are divided by the total of all its query cells. With `floor` it stores the greater of the two.

    Where all is causal and in order, `first_cell` is the cell of the prompt that the band begins with.
    """
    row = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    places = tl.arange(0, PADDED_HIGH)
    cell = before + row * HIGH + places  # numbers of cells within the band
    there = (places < HIGH) & (cell >= 0) & (cell < band)
    peak_at = head * k_tiles * band + cell[:, None]
    reached = k_tiles
    if first_cell is not None:
        last = (first_cell + before + row * HIGH + HIGH) * EVERY - 1
        reached = tl.minimum(k_tiles, last // (TILE_COLS * WIDE) + 1)

    best = tl.full([PADDED_HIGH], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_HIGH], tl.float32)
    for first in range(0, reached, TILES):
        tile = first + tl.arange(0, TILES)
        inside = there[:, None] & (tile < reached)[None, :]
        peak = tl.load(peak_ptr + peak_at + tile[None, :] * band, mask=inside, other=float("-inf"))
        part = tl.load(total_ptr + peak_at + tile[None, :] * band, mask=inside, other=0.0)
        new_best = tl.maximum(best, tl.max(peak, 1))
        origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp2(best - origin) + tl.sum(part * tl.exp2(peak - origin[:, None]), 1)
        best = new_best
    log_total = tl.where(total == 0.0, 0.0, best + tl.log2(tl.where(total == 0.0, 1.0, total)))

    if JOINT:
        of_cell = tl.where(total == 0.0, float("-inf"), log_total)
        highest = tl.max(of_cell, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        together = tl.sum(tl.exp2(of_cell - highest), 0)
        log_total = tl.zeros_like(log_total) + highest + tl.log2(tl.where(together == 0.0, 1.0, together))

    mass_at = mass_ptr + (head * rows + top + row) * cols
    in_tile = tl.arange(0, TILE_COLS)[None, :]
    for first in range(0, tl.cdiv(cols, TILE_COLS), AT_A_TIME):
        tile = first + tl.arange(0, AT_A_TIME)
        col = tile[:, None] * TILE_COLS + in_tile
        mass = tl.zeros([AT_A_TIME, TILE_COLS], tl.float32)
        if first < reached:
            # Where nothing was eligible, no sums were written, and none are read.
            if UNROLLED == 0:
                peak_here = peak_ptr + peak_at + tile[None, :] * band
                inside = there[:, None] & (tile < reached)[None, :]
                peak = tl.load(peak_here, mask=inside, other=float("-inf"))
                written = (inside & (peak > float("-inf")))[:, :, None]
                sums_here = (
                    sums_ptr + (head * band + cell)[:, None, None] * (k_tiles * TILE_COLS) + col[None, :, :]
                )
                sums = tl.load(sums_here, mask=written, other=0.0)
                mass = tl.sum(sums * tl.exp2(peak - log_total[:, None])[:, :, None], 0)
            else:
                # One cell after another, so that the sum does not depend on how threads share the columns.
                for some in range(0, PADDED_HIGH, UNROLLED):
                    for next_one in tl.static_range(UNROLLED):
                        place = some + next_one
                        one = before + row * HIGH + place
                        same = tl.zeros_like(tile)  # one number is no mask to Triton 3.9's interpreter
                        met = (same + place < HIGH) & (same + one >= 0) & (same + one < band)
                        inside = (tile < reached) & met
                        peak_here = peak_ptr + head * k_tiles * band + one + tile * band
                        peak = tl.load(peak_here, mask=inside, other=float("-inf"))
                        weight = tl.exp2(peak - tl.sum(tl.where(places == place, log_total, 0.0), 0))
                        written = (inside & (peak > float("-inf")))[:, None]
                        sums_here = sums_ptr + (head * band + one) * (k_tiles * TILE_COLS) + col
                        mass += tl.load(sums_here, mask=written, other=0.0) * weight[:, None]
        if floor_ptr is not None:
            other = tl.load(floor_ptr + (head * rows + top + row) * cols + col, mask=col < cols, other=0.0)
            mass = tl.maximum(other, mass * factor, propagate_nan=tl.PropagateNan.ALL)
        tl.store(mass_at + col, mass, mask=col < cols)

"""The Triton kernels of `coarse_order` that score: the range of every row, then the step of every key in a byte.

A row is the mean query of one segment and one query head. A program holds a tile of rows on chip, and walks a share of the
keys. Rows are numbered segment by segment, with the query heads that share keys side by side. The size of a tile of rows
does not depend on the prompt, so that a score has the same bits however the prompt is cut into chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.hardware import Hardware, hardware_of
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.ordering.key_importance_triton import options_of_weights
from blocksparse.kernels.ordering.score_steps import SAMPLED, STEPS
from blocksparse.launch.launches import remembered

ROWS_AT_ONCE = 128  # rows of a tile of rows, at most
SHARE, RANGE_SHARE = 2048, 4096  # keys per program of `_steps`, and of `_range`, which reads every eighth
_MOST = tl.constexpr(3.4028234663852886e38)  # the greatest finite fp32


def coarse_steps(mean: Tensor, k: Tensor, until: int, S: int) -> Tensor:
    """Steps of all keys that each segment orders, `[B, H, G, width]` uint8.

    After the last key a row is 255 up to a multiple of 16 entries; the rest of it has no meaning.
    """
    (B, H, G, D), Hkv = mean.shape, k.shape[1]
    mean = mean if mean.stride(-1) == 1 else mean.contiguous()
    end = max(0, until + (G - 1) * S)
    width = max(1, cdiv(end, 16)) * 16  # steps are read as int32, which a row of none could not be
    options = options_of_scores(D, k.element_size(), hardware_of(k))
    shares = max(1, cdiv(end, RANGE_SHARE))
    parts = torch.empty((2, B * H * G, shares), dtype=torch.float32, device=k.device)
    steps = torch.empty((B, H, G, width), dtype=torch.uint8, device=k.device)
    tiles = cdiv(H // Hkv * G, options["BLOCK_M"])
    sizes = mean.stride()[:3], k.stride()[:3], Hkv, H // Hkv, G, until, S
    constants = {"D": D, "BLOCK_D": max(16, power_of_2(D)), **options}
    _range[tiles, shares, B * Hkv](
        mean, k, parts, *sizes, shares,
        SHARE=RANGE_SHARE, SAMPLED=SAMPLED, **constants,
    )  # fmt: skip
    _steps[tiles, max(1, cdiv(end, SHARE)), B * Hkv](
        mean, k, parts.amax(-1), steps, *sizes, width,
        SHARE=SHARE, STEPS=STEPS, **constants,
    )  # fmt: skip
    return steps


def options_of_scores(head_dim: int, itemsize: int, hardware: Hardware) -> dict[str, int]:
    """Tiles of rows and of keys that fit on chip together."""
    options = options_of_weights(head_dim, itemsize, hardware)
    return {**options, "num_warps": 8} if hardware.multiplies_from_shared else options


@triton.jit
def _tile_of_rows(
    mean_ptr, mean_strides, key_heads, heads, G, until, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The tile of rows of this program.

    Returns its batch entry and KV head; the mean queries `[BLOCK_M, BLOCK_D]`; for each row its number in the output, how
    many keys its segment orders, and whether it exists; and how many keys the tile's last segment orders.
    """
    b = tl.program_id(2) // key_heads
    h = tl.program_id(2) % key_heads
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = place < heads * G
    g = tl.where(there, place // heads, 0)
    head = h * heads + place % heads
    dims = tl.arange(0, BLOCK_D)
    at = mean_ptr + b.to(tl.int64) * mean_strides[0] + head.to(tl.int64) * mean_strides[1]
    at = (at + g.to(tl.int64) * mean_strides[2])[:, None] + dims[None, :]
    mean = tl.load(at, mask=there[:, None] & (dims < D)[None, :], other=0.0)
    row = (b * key_heads * heads + head).to(tl.int64) * G + g
    last = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, heads * G) - 1
    return b, h, mean, row, tl.where(there, until + g * S, 0), there, until + last // heads * S


@triton.jit
def _scores(mean, k_ptr, k_strides, b, h, key, end, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scores of the keys `key`, `[BLOCK_M, BLOCK_N]` fp32; those from `end` on count as zeros."""
    dims = tl.arange(0, BLOCK_D)
    at = k_ptr + b.to(tl.int64) * k_strides[0] + h.to(tl.int64) * k_strides[1]
    at = at + key.to(tl.int64)[:, None] * k_strides[2] + dims[None, :]
    keys = tl.load(at, mask=(key < end)[:, None] & (dims < D)[None, :], other=0.0)
    return tl.dot(mean, tl.trans(keys), input_precision="ieee")


@remembered
@triton.jit(do_not_specialize=["G", "until", "shares"])
def _range(
    mean_ptr, k_ptr, parts_ptr, mean_strides, k_strides, key_heads, heads, G, until, S, shares,
    SAMPLED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores the greatest finite score of every row among the sampled keys of this share, and minus the least.

    Both are -inf if there is none.
    """
    b, h, mean, row, start, there, last = _tile_of_rows(
        mean_ptr, mean_strides, key_heads, heads, G, until, S, D, BLOCK_D, BLOCK_M
    )
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, last)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    minus_low = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for at in range(begin, end, BLOCK_N * SAMPLED):
        key = at + tl.arange(0, BLOCK_N) * SAMPLED + (SAMPLED - 1)
        scores = _scores(mean, k_ptr, k_strides, b, h, key, end, D, BLOCK_D)
        counted = (key[None, :] < start[:, None]) & (tl.abs(scores) <= _MOST)
        high = tl.maximum(high, tl.max(tl.where(counted, scores, float("-inf")), 1))
        minus_low = tl.maximum(minus_low, tl.max(tl.where(counted, -scores, float("-inf")), 1))
    rows = tl.num_programs(2).to(tl.int64) * heads * G
    tl.store(parts_ptr + row * shares + tl.program_id(1), high, mask=there)
    tl.store(parts_ptr + (rows + row) * shares + tl.program_id(1), minus_low, mask=there)


@remembered
@triton.jit(do_not_specialize=["G", "until"])
def _steps(
    mean_ptr, k_ptr, range_ptr, steps_ptr, mean_strides, k_strides, key_heads, heads, G, until, S, width,
    STEPS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores the step of every key of this share, for the rows whose segment it precedes, and 255 after a row's last."""
    b, h, mean, row, start, there, last = _tile_of_rows(
        mean_ptr, mean_strides, key_heads, heads, G, until, S, D, BLOCK_D, BLOCK_M
    )
    rows = tl.num_programs(2).to(tl.int64) * heads * G
    high = tl.load(range_ptr + row, mask=there, other=0.0)
    span = high + tl.load(range_ptr + rows + row, mask=there, other=0.0)
    spread = (span > 0.0) & (span <= _MOST)
    factor = tl.div_rn(tl.zeros_like(span) + STEPS, tl.where(spread, span, 1.0))
    factor = tl.where(spread, tl.minimum(factor, _MOST), 0.0)
    high = tl.where(spread, high, 0.0)
    begin = tl.program_id(1) * SHARE
    end = tl.minimum(begin + SHARE, last)
    for at in range(begin, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        scores = _scores(mean, k_ptr, k_strides, b, h, key, end, D, BLOCK_D)
        scores = tl.where(scores != scores, -_MOST, tl.minimum(tl.maximum(scores, -_MOST), _MOST))
        steps = tl.minimum(tl.maximum((high[:, None] - scores) * factor[:, None], 0.0), STEPS - 1.0)
        steps_at = steps_ptr + row[:, None] * width + key[None, :]
        steps = tl.where(key[None, :] < start[:, None], steps, 255.0)
        tl.store(steps_at, steps.to(tl.uint8), mask=key[None, :] < ((start + 15) // 16 * 16)[:, None])

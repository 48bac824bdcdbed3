"""The Triton kernels of `coarse_order` that score and choose: each row's range, the step of every key, and those that are kept.

A row is the mean query of one segment and one query head. A program holds a tile of rows on chip, and walks a share of the
keys. Rows are numbered segment by segment, with the query heads that share keys side by side. The size of a tile of rows
does not depend on the prompt, so that a score has the same bits however the prompt is cut into chunks.

`choose` has one program per row. A row keeps its keys of the lowest steps, `count` of them or all that it has. So it searches for the greatest step that is kept. All better keys are kept. Of the keys
of that step (the tied ones), as many are kept as there is room for, in order of position. A sample guesses that step, and a
search among the 16 steps around the guess counts all keys. If the step may lie outside them, a search among all steps
follows.

A step is a byte, and four are read at a time, as a *word*: an int32 whose lowest byte is the step of the first key.
`coarse_order.py` says how a kept key is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import rows_of
from blocksparse.kernels.common.hardware import Hardware, hardware_of
from blocksparse.kernels.common.sizes import cdiv, power_of_2
from blocksparse.kernels.gemm.strided_products_triton import total
from blocksparse.kernels.order.coarse_order import SAMPLED, STEPS
from blocksparse.kernels.order.segments_triton import options_of_weights
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

    Returns its batch entry and KV head, and the mean queries `[BLOCK_M, BLOCK_D]`. For each row it returns its number in the
    output, how many keys its segment orders, and whether it exists. The last result is how many keys the tile's last segment
    orders.
    """
    b = tl.program_id(2) // key_heads
    h = tl.program_id(2) % key_heads
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = place < heads * G
    g = tl.where(there, place // heads, 0)
    head = h * heads + place % heads
    mean = rows_of(mean_ptr, mean_strides, b, head, g, there, D, BLOCK_D, False)
    row = (b * key_heads * heads + head).to(tl.int64) * G + g
    last = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, heads * G) - 1
    return b, h, mean, row, tl.where(there, until + g * S, 0), there, until + last // heads * S


@triton.jit
def _scores(mean, k_ptr, k_strides, b, h, key, end, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scores of the keys `key`, `[BLOCK_M, BLOCK_N]` fp32; those from `end` on count as zeros."""
    keys = rows_of(k_ptr, k_strides, b, h, key, key < end, D, BLOCK_D, False)
    return tl.dot(mean, tl.trans(keys), input_precision="ieee")


@remembered
@triton.jit(do_not_specialize=["G", "until", "shares"])
def _range(
    mean_ptr, k_ptr, parts_ptr, mean_strides, k_strides, key_heads, heads, G, until, S, shares,
    SAMPLED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores the greatest finite score of every row among the sampled keys of this share, and minus the least, or -inf."""
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


TILE = 4096  # steps that a program reads at a time; fewer than 2^15, so that two counts of them fit one int32
SAMPLE = 1024  # words of four steps that the guess looks at
_HIGH = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.jit
def row_of_maps(H, G, until, S, count):
    """This program's batch entry, head and segment, how many keys that segment orders, and how many of these are kept.

    The longest rows start first.
    """
    heads = tl.num_programs(0) // G
    g = G - 1 - tl.program_id(0) // heads
    bh = tl.program_id(0) % heads
    start = tl.maximum(until + g * S, 0)
    return bh // H, bh % H, g, start, tl.minimum(start, count)


@triton.jit
def _at_most(words, step):
    """A 1 in each byte of the result where that byte `w` of `words` is at most `step`, else a 0; all are from 0 to 255.

    One subtraction compares the lower 7 bits of four bytes. A product with 0x01010101 copies the lower bits of `step` into
    all bytes, and `_HIGH` sets each byte's highest bit. So a byte becomes `128 + step % 128 - w % 128`. That is between 1
    and 255, so no byte borrows from its neighbour. It is 128 or more, with its highest bit set, just where `w % 128 <= step
    % 128`.

    What remains is the highest bit of `w` and that of `step`. If `step` is below 128, `w <= step` needs both that the
    highest bit of `w` is 0 and that the lower bits fit: `fits & ~w`. Else one of the two is enough: `fits | ~w`. The answer
    is shifted to each byte's lowest bit.
    """
    fits = (((step & 127) * 0x01010101) | _HIGH) - (words & 0x7F7F7F7F)
    fits = (fits & ~words) | (tl.where(step > 127, _HIGH, 0) & (fits | ~words))
    return (fits >> 7) & 0x01010101


@triton.jit
def _sum_of_bytes(words):
    """The sum of all bytes, from 0 to 255 each, of `words` `[1, n]`.

    Each word's bytes are added in pairs into two fields of 16 bits, at most 510 each, then these to each other.
    """
    pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
    return tl.sum(tl.sum((pairs & 0xFFFF) + (pairs >> 16), 1), 0)


@triton.jit
def _narrowed(words_at, words, want, last, better, unit, WORDS: tl.constexpr):
    """One round of the search for the greatest step that is kept, taken to be from `last` to `last + 4 * unit - 1`.

    The three inner bounds are `last` plus one, two and three times `unit`. For each bound, the keys are counted whose step
    lies below it. The greatest step that is kept is the first one at which `want` keys are reached. So where fewer than
    `want` keys lie below a bound, that step is at or after the bound. Counts grow with the bound, so as many bounds as have
    fewer are all before that step.

    Returns the greatest such bound, or `last`, and how many keys lie below it. If that is `last`, the count is the argument
    `better`, the number of keys below `last`. At the start of a search at a guess it is 0, since no keys were counted; if
    the search ends there, it is repeated among all steps. Words past the row's end read as four steps of 255, which are
    never counted: no bound exceeds 255.
    """
    place = tl.arange(0, WORDS)[None, :]
    below_one, below_two, below_three = want * 0, want * 0, want * 0
    for part in range(0, words, 255 * WORDS):  # each byte counts the keys in its own place, and holds up to 255
        one = tl.zeros([1, WORDS], tl.int32)
        two = tl.zeros([1, WORDS], tl.int32)
        three = tl.zeros([1, WORDS], tl.int32)
        for at in tl.range(part, tl.minimum(part + 255 * WORDS, words), WORDS, loop_unroll_factor=4):
            some = tl.load(words_at + at + place, mask=place < words - at, other=-1)
            one += _at_most(some, last + unit - 1)
            two += _at_most(some, last + 2 * unit - 1)
            three += _at_most(some, last + 3 * unit - 1)
        below_one += _sum_of_bytes(one)
        below_two += _sum_of_bytes(two)
        below_three += _sum_of_bytes(three)
    better = tl.where(below_one < want, below_one, better)
    better = tl.where(below_two < want, below_two, better)
    better = tl.where(below_three < want, below_three, better)
    fewer = (below_one < want).to(tl.int32) + (below_two < want).to(tl.int32) + (below_three < want).to(tl.int32)
    return last + unit * fewer, better


@triton.jit
def _guess(words_at, words, want, SAMPLE: tl.constexpr):
    """A guess of the greatest step that is kept, from up to `SAMPLE` words at even distances: a search bit by bit."""
    apart = tl.cdiv(words, SAMPLE)
    word = tl.arange(0, SAMPLE)[None, :] * apart
    sample = tl.load(words_at + word, mask=word < words, other=-1)
    last = want * 0
    for i in range(8):
        unit = 128 >> i
        below = _sum_of_bytes(_at_most(sample, last + unit - 1))
        last += tl.where(below * apart < want, unit, 0)
    return last


@remembered
@triton.jit(do_not_specialize=["until", "G"])
def choose(
    words_ptr, kept_ptr, until, S, H, G, width, count,
    TILE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Stores the `count` keys of the lowest steps of a row, in order of position."""
    b, h, g, start, want = row_of_maps(H, G, until, S, count)
    row = (b * H + h).to(tl.int64) * G + g
    words = (start + 15) // 16 * 4  # the last ones are filled up with steps of 255
    WORDS: tl.constexpr = TILE // 4
    words_at = words_ptr + row * (width // 4)

    # The greatest step that is kept, two bits in each round: first among 16 around the guess.
    least = tl.minimum(tl.maximum(_guess(words_at, words, want, SAMPLE) - 7, 0), 240)
    last, better = least, want * 0
    for i in range(2):
        last, better = _narrowed(words_at, words, want, last, better, 4 >> (2 * i), WORDS)
    # If the answer is the first or the last of the 16, the step may lie outside them (and below the first one `better` was
    # not counted): search all 256.
    if ((last == least) & (least > 0)) | ((last == least + 15) & (least < 240)):
        last, better = want * 0, want * 0
        for i in range(4):
            last, better = _narrowed(words_at, words, want, last, better, 64 >> (2 * i), WORDS)

    room = want - better  # how many keys of step `last` are kept: the first ones by position
    kept, tied = want * 0, want * 0
    kept_at = kept_ptr + row * count
    word = tl.arange(0, WORDS // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # a thread has four neighbouring words
    upcoming = tl.load(words_at + word, mask=word < words, other=-1)
    for at in range(0, words, WORDS):
        some = upcoming
        upcoming = tl.load(words_at + at + WORDS + word, mask=word < words - at - WORDS, other=-1)
        # `is_better` and `is_tied` have a 1 in the byte of each such key. Their product with 0x01010101 has in each byte the
        # sum of this byte and of all lower ones: how many such keys the word has up to there, and in byte 3 in all.
        is_better = tl.where(last > 0, _at_most(some, last - 1), 0)
        is_tied = _at_most(some, last) ^ is_better
        ties = is_tied * 0x01010101
        both = ((is_better * 0x01010101) >> 24) + ((ties >> 24) << 16)  # tied keys above the lower 16 bits
        of_thread = tl.sum(both, 1)
        before = (tl.cumsum(of_thread, 0) - of_thread)[:, None] + tl.cumsum(both, 1) - both
        ties_before = tied + (before >> 16)
        # A tied key is kept if it is among the `left` first ones of its word. Byte by byte, `128 + left - ties` has its
        # highest bit set just there, as in `_at_most`; `is_tied` picks that bit after the shift.
        left = tl.minimum(tl.maximum(room - ties_before, 0), 4)
        is_kept = is_better | (is_tied & (((left * 0x01010101 | _HIGH) - ties) >> 7))
        slots = is_kept * 0x01010101
        slot = kept + (before & 0xFFFF) + tl.minimum(ties_before, room) - 1
        position = (at + word) * 4
        for byte in tl.static_range(4):
            kept_key = ((some >> (8 * byte)) << 24) | (position + byte)
            is_there = ((is_kept >> (8 * byte)) & 1) != 0
            tl.store(kept_at + slot + ((slots >> (8 * byte)) & 255), kept_key, mask=is_there)
        of_tile = total(of_thread)
        kept += of_tile & 0xFFFF
        tied += of_tile >> 16

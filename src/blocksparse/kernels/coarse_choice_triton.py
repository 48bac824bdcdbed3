"""The Triton kernel of `coarse_order` that chooses: one program per row, no sort.

The search for the step at which a row is full reads four steps at a time, as the bytes of an int32. A kept key is its
step in the upper 8 bits of an int32 and its position in the lower 24.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048  # steps at a time; fewer than 2^15
_HIGH = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.jit
def row_of_maps(H, G, first, S, count):
    """Batch, head and segment of this program, the keys before it, how many of them fit; longest rows first."""
    heads = tl.num_programs(0) // G
    g = G - 1 - tl.program_id(0) // heads
    bh = tl.program_id(0) % heads
    start = (first + g) * S
    return bh // H, bh % H, g, start, tl.minimum(start, count)


@triton.jit
def _total(x):
    """Of a tile `[1, n]`; sums over the only axis of a tensor fail in Triton 3.7 on sm_100."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _at_most(words, step):
    """A 1 in every byte of an int32 that is no more than `step`, as numbers of 0 to 255."""
    fits = (((step & 127) * 0x01010101) | _HIGH) - (words & 0x7F7F7F7F)  # in the highest bit: their lower 7 bits
    fits = (fits & ~words) | (tl.where(step > 127, _HIGH, 0) & (fits | ~words))
    return (fits >> 7) & 0x01010101


@triton.jit
def _sum_of_bytes(words):
    """Over a tile of int32 `[1, n]`."""
    pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
    return _total((pairs & 0xFFFF) + (pairs >> 16))


@triton.jit
def choose(
    steps_ptr, words_ptr, kept_ptr, first, S, H, G, width, count,
    TILE: tl.constexpr,
):  # fmt: skip
    """The `count` keys of the least steps, by position."""
    b, h, g, start, want = row_of_maps(H, G, first, S, count)
    row = (b * H + h).to(tl.int64) * G + g
    filled = (start + 15) // 16 * 16  # with 255 after the last key

    # The greatest step that is kept, two bits at a time: how many keys are below it with these bits at 1, 2, 3?
    WORDS: tl.constexpr = TILE // 4
    words_at = words_ptr + row * (width // 4)
    word = tl.arange(0, WORDS)[None, :]
    last, better = want * 0, want * 0
    for i in tl.static_range(4):
        unit = 64 >> (2 * i)
        below_one, below_two, below_three = want * 0, want * 0, want * 0
        for part in range(0, filled // 4, 255 * WORDS):  # a byte counts to 255
            one = tl.zeros([1, WORDS], tl.int32)
            two = tl.zeros([1, WORDS], tl.int32)
            three = tl.zeros([1, WORDS], tl.int32)
            for at in tl.range(part, tl.minimum(part + 255 * WORDS, filled // 4), WORDS, loop_unroll_factor=4):
                words = tl.load(words_at + at + word, mask=word < filled // 4 - at, other=-1)
                one += _at_most(words, last + unit - 1)
                two += _at_most(words, last + 2 * unit - 1)
                three += _at_most(words, last + 3 * unit - 1)
            below_one += _sum_of_bytes(one)
            below_two += _sum_of_bytes(two)
            below_three += _sum_of_bytes(three)
        better = tl.where(below_one < want, below_one, better)
        better = tl.where(below_two < want, below_two, better)
        better = tl.where(below_three < want, below_three, better)
        last += tl.where(below_one < want, unit, 0)
        last += tl.where(below_two < want, unit, 0)
        last += tl.where(below_three < want, unit, 0)

    room = want - better  # for keys of the last step
    kept, tied = want * 0, want * 0
    kept_at = kept_ptr + row * count
    steps_at = steps_ptr + row * width
    place = tl.arange(0, TILE)[None, :]
    for at in range(0, start, TILE):
        step = tl.load(steps_at + at + place, mask=place < filled - at, other=255).to(tl.int32)
        is_better = step < last
        is_tied = (step == last) & (place < start - at)
        both = is_better.to(tl.int32) + (is_tied.to(tl.int32) << 16)  # two counts in one
        running = tl.cumsum(both, 1)
        ties = tied + (running >> 16)
        slot = kept + (running & 0xFFFF) + tl.minimum(ties, room) - 1
        tl.store(kept_at + slot, (step << 24) | (at + place), mask=is_better | (is_tied & (ties <= room)))
        total = _total(both)
        kept += total & 0xFFFF
        tied += total >> 16

"""The Triton kernel of `coarse_order` that chooses: one program per row, no sort.

Four steps are read at a time, as the bytes of an int32. A sample guesses the step at which a row is full, and a search
around it counts all keys; where it fails, one over all steps does. A kept key is its step in the upper 8 bits of an int32
and its position in the lower 24.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 4096  # steps at a time; fewer than 2^15
SAMPLE = 1024  # words of four steps that the guess sees
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
def _narrowed(words_at, words, want, last, better, unit, WORDS: tl.constexpr):
    """The greatest step that is kept, `last` or more, to `unit` of four: how many keys of a row are below 1, 2 and 3?"""
    word = tl.arange(0, WORDS)[None, :]
    below_one, below_two, below_three = want * 0, want * 0, want * 0
    for part in range(0, words, 255 * WORDS):  # a byte counts to 255
        one = tl.zeros([1, WORDS], tl.int32)
        two = tl.zeros([1, WORDS], tl.int32)
        three = tl.zeros([1, WORDS], tl.int32)
        for at in tl.range(part, tl.minimum(part + 255 * WORDS, words), WORDS, loop_unroll_factor=4):
            some = tl.load(words_at + at + word, mask=word < words - at, other=-1)
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
    """The greatest step that is kept, by words that are evenly apart."""
    apart = tl.cdiv(words, SAMPLE)
    word = tl.arange(0, SAMPLE)[None, :] * apart
    sample = tl.load(words_at + word, mask=word < words, other=-1)
    last = want * 0
    for i in range(8):
        unit = 128 >> i
        below = _sum_of_bytes(_at_most(sample, last + unit - 1))
        last += tl.where(below * apart < want, unit, 0)
    return last


@triton.jit(do_not_specialize=["first", "G"])
def choose(
    words_ptr, kept_ptr, first, S, H, G, width, count,
    TILE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """The `count` keys of the least steps, by position."""
    b, h, g, start, want = row_of_maps(H, G, first, S, count)
    row = (b * H + h).to(tl.int64) * G + g
    words = (start + 15) // 16 * 4  # with 255 after the last key
    WORDS: tl.constexpr = TILE // 4
    words_at = words_ptr + row * (width // 4)

    # The greatest step that is kept, two bits at a time: first among the 16 around a guess.
    least = tl.minimum(tl.maximum(_guess(words_at, words, want, SAMPLE) - 7, 0), 240)
    last, better = least, want * 0
    for i in range(2):
        last, better = _narrowed(words_at, words, want, last, better, 4 >> (2 * i), WORDS)
    # At an end of the 16 it may lie beyond.
    if ((last == least) & (least > 0)) | ((last == least + 15) & (least < 240)):
        last, better = want * 0, want * 0
        for i in range(4):
            last, better = _narrowed(words_at, words, want, last, better, 64 >> (2 * i), WORDS)

    room = want - better  # for keys of the last step; what fills the row up comes after as many of them
    kept, tied = want * 0, want * 0
    kept_at = kept_ptr + row * count
    word = tl.arange(0, WORDS // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # a thread has four in a row
    upcoming = tl.load(words_at + word, mask=word < words, other=-1)
    for at in range(0, words, WORDS):
        some = upcoming
        upcoming = tl.load(words_at + at + WORDS + word, mask=word < words - at - WORDS, other=-1)
        # A 1 in the byte of each key that is better or tied; a product with 0x01010101 counts them up to each byte.
        is_better = tl.where(last > 0, _at_most(some, last - 1), 0)
        is_tied = _at_most(some, last) ^ is_better
        ties = is_tied * 0x01010101
        both = ((is_better * 0x01010101) >> 24) + ((ties >> 24) << 16)  # two counts in one
        of_thread = tl.sum(both, 1)
        before = (tl.cumsum(of_thread, 0) - of_thread)[:, None] + tl.cumsum(both, 1) - both
        ties_before = tied + (before >> 16)
        left = tl.minimum(tl.maximum(room - ties_before, 0), 4)
        is_kept = is_better | (is_tied & (((left * 0x01010101 | _HIGH) - ties) >> 7))
        slots = is_kept * 0x01010101
        slot = kept + (before & 0xFFFF) + tl.minimum(ties_before, room) - 1
        position = (at + word) * 4
        for byte in tl.static_range(4):
            kept_key = ((some >> (8 * byte)) << 24) | (position + byte)
            is_there = ((is_kept >> (8 * byte)) & 1) != 0
            tl.store(kept_at + slot + ((slots >> (8 * byte)) & 255), kept_key, mask=is_there)
        total = _total(of_thread[None, :])
        kept += total & 0xFFFF
        tied += total >> 16

"""The Triton kernel of `coarse_order` that chooses which keys are kept: one program per row, without a sort.

A key has a step, a number from 0 to 255, and keys of low steps are better. A row keeps its keys of the lowest
steps, `count` of them or all that it has, so all that is to be found is the greatest step that is kept: all better keys are kept, and of the keys of that step
(the tied ones) as many as there is room for, in order of position. A sample guesses that step, and a search among the 16
steps around the guess counts all keys; if the step may lie outside them, a search among all steps follows.

A step is a byte, and four are read at a time, as a *word*: an int32 whose lowest byte is the step of the first key.
`score_steps.py` says how a kept key is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.launch.launches import remembered

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
def _total(x):
    """The sum of `x` `[1, n]`. Triton 3.7 cannot sum a tensor of one axis for sm_100, so `x` has two."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _at_most(words, step):
    """A 1 in each byte of the result where that byte `w` of `words` is at most `step`, else a 0; all are from 0 to 255.

    One subtraction compares the lower 7 bits of four bytes. A product with 0x01010101 copies the lower bits of `step` into
    all bytes, and `_HIGH` sets each byte's highest bit, so a byte becomes `128 + step % 128 - w % 128`. That is between 1
    and 255, so no byte borrows from its neighbour, and it is 128 or more, with its highest bit set, just where
    `w % 128 <= step % 128`.

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
    return _total((pairs & 0xFFFF) + (pairs >> 16))


@triton.jit
def _narrowed(words_at, words, want, last, better, unit, WORDS: tl.constexpr):
    """One round of the search for the greatest step that is kept, taken to be from `last` to `last + 4 * unit - 1`.

    The three inner bounds are `last` plus one, two and three times `unit`, and for each the keys are counted whose step
    lies below it, which is at most the bound less one. The greatest step that is kept is the first one at which `want` keys
    are reached; so where fewer than `want` keys lie below a bound, that step is at or after the bound. Counts grow with the
    bound, so as many bounds as have fewer are all before that step.

    Returns the greatest such bound, or `last`, and how many keys lie below it. If that is `last`, the count is `better` as
    it was given: the number of keys below `last`, or 0 at the start of a search at a guess, which counted none and starts
    anew among all steps if it ends there. Words past the row's end read as four steps of 255, which are never counted: no
    bound exceeds 255.
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
        total = _total(of_thread[None, :])
        kept += total & 0xFFFF
        tied += total >> 16

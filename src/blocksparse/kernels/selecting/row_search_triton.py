"""What selections without a sort share: the key at which a row's running sum, best key first, reaches a target."""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.positions.block_grid_triton import any_of

_PER_THREAD = 32  # keys: few warps for a row, since they wait for one another
_ENTRIES, _LEAST = 512, 256  # of a tile of short rows, and of a row
_STEPS = tl.constexpr(8)  # guesses before a look at which keys are left
_NO_KEY = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(2**31 - 1)


def tile_of_rows(cols: int) -> tuple[int, int, int]:
    """Rows and columns of a tile that holds whole rows on chip, and warps; the same for all short rows."""
    wide = max(power_of_2(cols), _LEAST)
    high = max(_ENTRIES // wide, 1)
    return high, wide, max(1, min(16, high * wide // (32 * _PER_THREAD)))


@triton.jit
def _guess(low, high, above_low, above_high, target, bisect):
    """A number between `low` and `high`, if there is one: half way, or as far as the target is between their sums."""
    span = above_low - above_high
    part = tl.where(span > 0.0, (above_low - target) / tl.where(span > 0.0, span, 1.0), 0.5)
    part = tl.minimum(tl.maximum(0.65 * part + 0.175, 0.02), 0.98)  # towards the middle: both bounds must move
    part = tl.where(bisect, 0.5, part)
    # The way from low to high may be longer than int32 holds; additions wrap around.
    middle = low + (part * (high.to(tl.float32) - low.to(tl.float32))).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.maximum(low, tl.minimum(high - 1, tl.maximum(middle, low + 1)))


@triton.jit
def cut(key, weight, low, high, above_low, target, BY_KEY: tl.constexpr):
    """The key of a row above which weights sum to less than `target`, and from which on to no less.

    Keys are int32 `[ROWS, COLS]`, the others columns `[ROWS, 1]`. Sums are fp32 `[ROWS, 1]`: that of the keys above
    `low`, or more, is `above_low`; above `high` there are none. Weights are fp32 `[ROWS, COLS]`: 1, or, `BY_KEY`,
    non-negative numbers with the key as their bits. Exact as far as sums in fp32 are.
    """
    above_high = tl.zeros_like(target)
    rounds = 0
    searching = any_of(high > low + 1)
    while searching:
        step = 0
        while searching & (step < _STEPS):
            middle = _guess(low, high, above_low, above_high, target, rounds > 0)
            above = tl.sum(tl.where(key > middle, weight, 0.0), 1, keep_dims=True)
            less = (above < target) & (middle > low)
            above_high = tl.where(less, above, above_high)
            above_low = tl.where(less, above_low, above)
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
            if BY_KEY:
                lightest = low.to(tl.float32, bitcast=True)
            else:
                lightest = tl.full(target.shape, 1.0, tl.float32)
            # Two keys weigh at least twice the lightest that may be left.
            searching = any_of((high > low + 1) & (above_low - above_high >= 1.75 * lightest))
            step += 1
        if searching:  # keys that tie, or lie in heaps: draw both bounds up to those left
            left = (key > low) & (key <= high)
            low = tl.maximum(low, tl.min(tl.where(left, key, _LARGEST), 1, keep_dims=True) - 1)
            high = tl.maximum(tl.max(tl.where(left, key, _NO_KEY), 1, keep_dims=True), low + 1)
            searching = any_of(high > low + 1)
        rounds += 1
    return tl.max(tl.where(key <= high, key, _NO_KEY), 1, keep_dims=True)


@triton.jit
def first_of(chosen, number, unit, missing, BEFORE: tl.constexpr):
    """The columns of `chosen` `[ROWS, COLS]` up to which `unit`s, one for each, come to less than `missing`.

    Args:
        number: how many are chosen, `[ROWS, 1]`.
        BEFORE: count those before a column; else also itself.
    """
    itself: tl.constexpr = 1 if BEFORE else 0
    if any_of((number - itself) * unit >= missing):  # seldom: keys would have to tie
        chosen = chosen & ((tl.cumsum(chosen.to(tl.int32), 1) - itself) * unit < missing)
    return chosen

"""What selections without a sort share: the key at which a row's running sum, greatest key first, reaches a target."""

from __future__ import annotations

import triton
import triton.language as tl

from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.positions.block_grid_triton import any_of

_PER_THREAD = 32  # keys per thread: that makes few warps for a row, since they wait for one another
_LEAST = 256  # keys of a launch tile: all short rows get the same
_STEPS = tl.constexpr(8)  # guesses before the bounds are drawn up to the keys that are left
_NO_KEY = tl.constexpr(-(2**31))  # below every key: where a row has none
_LARGEST = tl.constexpr(2**31 - 1)


def width_of_rows(cols: int, per_thread: int = _PER_THREAD, least: int = _LEAST) -> tuple[int, int]:
    """Columns of a launch tile that holds a row on chip, `least` or more, and its warps."""
    wide = max(power_of_2(cols), least)
    return wide, max(1, min(16, wide // (32 * per_thread)))


@triton.jit
def _guess(low, high, above_low, above_high, target, bisect):
    """A number between `low` and `high`, if there is one: half way if `bisect`, else by interpolation.

    Interpolation goes as far from `low` to `high` as the target is from the sum above `low` to the sum above `high`.
    """
    span = above_low - above_high
    part = tl.where(span > 0.0, (above_low - target) / tl.where(span > 0.0, span, 1.0), 0.5)
    part = tl.minimum(tl.maximum(0.65 * part + 0.175, 0.02), 0.98)  # to the middle, so that both bounds move
    part = tl.where(bisect, 0.5, part)
    # The difference of low and high may not fit an int32; it fits a uint32, and the addition wraps around.
    middle = low + (part * (high.to(tl.float32) - low.to(tl.float32))).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.maximum(low, tl.minimum(high - 1, tl.maximum(middle, low + 1)))


@triton.jit
def cut(key, weight, low, high, above_low, target, BY_KEY: tl.constexpr):
    """The key of each row at which the sum of weights, greatest key first, reaches `target`.

    The keys above it weigh less than `target` together; with those that equal it they weigh `target` or more. This is exact
    as far as sums in fp32 are.

    Args:
        key: int32 `[ROWS, COLS]`.
        weight: fp32 `[ROWS, COLS]`: all 1; or, with `BY_KEY`, numbers that are not negative and whose bits are the key.
        low, high: int32 `[ROWS, 1]`; the key that is sought is above `low`, and no key is above `high`.
        above_low: fp32 `[ROWS, 1]`, the weight of the keys above `low`, or more.
        target: fp32 `[ROWS, 1]`.
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
            # If two keys were left between the bounds, they would weigh at least twice what the lightest may weigh.
            searching = any_of((high > low + 1) & (above_low - above_high >= 1.75 * lightest))
            step += 1
        if searching:  # keys are equal, or crowd together: draw both bounds up to the keys that are left
            left = (key > low) & (key <= high)
            low = tl.maximum(low, tl.min(tl.where(left, key, _LARGEST), 1, keep_dims=True) - 1)
            high = tl.maximum(tl.max(tl.where(left, key, _NO_KEY), 1, keep_dims=True), low + 1)
            searching = any_of(high > low + 1)
        rounds += 1
    return tl.max(tl.where(key <= high, key, _NO_KEY), 1, keep_dims=True)


@triton.jit
def first_of(chosen, number, unit, missing, BEFORE: tl.constexpr):
    """The first columns of `chosen` `[ROWS, COLS]`, as long as they weigh less than `missing`, if each weighs `unit`.

    Args:
        number: how many are chosen, `[ROWS, 1]`.
        BEFORE: compare the weight of the chosen columns before a column; else that column's is included.
    """
    itself: tl.constexpr = 1 if BEFORE else 0
    if any_of((number - itself) * unit >= missing):  # seldom, for keys would have to be equal
        chosen = chosen & ((tl.cumsum(chosen.to(tl.int32), 1) - itself) * unit < missing)
    return chosen

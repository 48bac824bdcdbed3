"""The softmax and the powers of Hopper's attention kernel against float64, without a GPU: their PTX is run in numpy.

A warp has 16 rows of a tile of scores. Tests on a GPU say whether what surrounds these texts is right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.attention.ptx_warp import run

pytest.importorskip("triton")
from blocksparse.kernels.hopper.rows import LOWEST
from blocksparse.kernels.hopper.softmax import SHARE, _most, _pair, _powers_asm, _softmax_asm

Array = Any
gl = pytest.importorskip("triton.experimental.gluon.language")
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
LANE = np.arange(32)
SCALE = 0.75


def softmax(scores: Array, reference: Array, scale: float, first: bool, dtype: torch.dtype, rounded: bool) -> Any:
    """`hopper.softmax.softmax` of `scores` `[16, n]`: weights `[16, n]`, and `[3, 16, 4]`, references, factors and sums."""
    n, half = scores.shape[1] // 2, TYPES[dtype]
    pair = str(_pair(half)) if rounded else ""
    weights = n // 2 if pair else n
    number = np.arange(n)[:, None]
    row = LANE // 4 + 8 * (number // 2 % 2)
    key = number // 4 * 8 + LANE % 4 * 2 + number % 2
    given = scores[row, key], reference[row, LANE % 4], np.full((n, 32), scale)
    at = weights + n
    operands = {at + i: x for i, x in enumerate(np.concatenate(given).astype(np.float32))}
    got = run(str(_softmax_asm(n, pair, first, float(_most(half)))), operands)
    weight = np.zeros(scores.shape, np.float32)
    weight[row, key] = np.concatenate([got[i] for i in range(weights)]).reshape(n, 32)
    of_rows = np.zeros((3, 16, 4), np.float32)
    for i, x in enumerate((0, 4, 8)):
        for second in (0, 1):
            of_rows[i, LANE // 4 + 8 * second, LANE % 4] = got[weights + x + 2 * second]
    return torch.from_numpy(weight).to(dtype).float().numpy(), of_rows


def attend(scores: Array, values: Array, scale: float, dtype: torch.dtype, rounded: bool, tile: int) -> Any:
    """Means `[16, D]` and log-sum-exp in base 2 `[16]`, by tiles of so many keys, as a consumer has them."""
    highest = np.full((16, 4), LOWEST.value, np.float32)
    total, sums = np.zeros((16, 4), np.float32), np.zeros((16, values.shape[1]))
    with np.errstate(all="ignore"):
        for at in range(0, scores.shape[1], tile):
            weight, (highest, factor, parts) = softmax(
                scores[:, at : at + tile], highest, scale, at == 0, dtype, rounded
            )
            assert (highest == highest[:, :1]).all()  # the threads of a row agree
            total = total * factor + parts
            sums = sums * factor[:, :1] + weight.astype(np.float64) @ values[at : at + tile]
        whole = total.sum(1)
        mean = np.where((whole == 0)[:, None], 0.0, sums / whole[:, None])
        return mean, np.where(whole == 0, -np.inf, highest[:, 0] + np.log2(whole))


def exactly(scores: Array, values: Array, scale: float) -> Any:
    """The same in float64."""
    logits = torch.from_numpy(scores.astype(np.float64) * scale) * math.log(2)
    weight = logits.softmax(-1).nan_to_num(nan=0.0)
    return (weight @ torch.from_numpy(values)).numpy(), (logits.logsumexp(-1) / math.log(2)).numpy()


def some_scores(kind: str, n: int, tile: int) -> Array:
    """`[16, n]` fp32, whose rows differ by a size of up to 1e6."""
    draw = np.random.default_rng(0)
    noise, at = draw.standard_normal((16, n)), np.arange(n) // tile
    size = np.array([0.1, 3, 30, 1e3, 1e5, 1e6, 13.9, 39.9] * 2)[:, None]
    scores = noise + {
        "rising": size * at,
        "falling": -size * at,
        "both": size * (at % 3 - 1),
        "wild": noise * size,
    }.get(kind, 0 * size)
    if kind == "hidden first":
        scores = noise * size
        scores[:, :tile] = -np.inf
        scores[3] = -np.inf
    if kind == "far below":  # few bits, so that the maximum is not rounded
        scores = -(2.0**127) * (1 - at / 64) + 0 * noise
        scores[:8, :tile] = -np.inf
    if kind == "great":  # the fused product of a score and the scale is not rounded, and its maximum is
        scores = 1e8 * (1 - at / 10) + noise
    if kind == "at the limit":  # sums of a thread about 2^14, and about 2^40
        scores = (np.where(size < 30, 14.0, 40.0) - math.log2(tile // 4) + 1e-3 * noise) / SCALE
        scores[:, :tile] = 0
    return scores.astype(np.float32)


KINDS = ["rising", "falling", "both", "wild", "hidden first", "far below", "great", "at the limit"]


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("rounded", [True, False], ids=["rounded", "fp32"])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_float64(kind: str, dtype: torch.dtype, rounded: bool, tile: int) -> None:
    """Whatever logits do from tile to tile; sums keep fp32's precision, and the means that of weights."""
    scores = some_scores(kind, 5 * tile, tile)
    values = 6e4 * np.random.default_rng(1).uniform(-1, 1, (5 * tile, 4))
    got, got_sum = attend(scores, values, SCALE, dtype, rounded, tile)
    want, want_sum = exactly(scores, values, SCALE)
    np.testing.assert_allclose(got / 6e4, want / 6e4, rtol=0, atol=4e-3 if dtype == torch.bfloat16 else 6e-4)
    np.testing.assert_allclose(got_sum, want_sum, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
def test_how_far_off_a_mean_of_equal_values_is(dtype: torch.dtype, most: float) -> None:
    """Weights are rounded and their sum is not: as in docs/reference/numerics.md, and by more than half of that."""
    scores = 8 * np.random.default_rng(0).standard_normal((16, 320)).astype(np.float32)
    mean, _ = attend(scores, np.ones((320, 1)), 1.0, dtype, True, 64)
    assert most / 2 < np.abs(mean - 1).max() <= most


@pytest.mark.parametrize("other", [0.0, 1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype, other: float) -> None:
    scores = some_scores("both", 4 * 64, 64)
    values = np.random.default_rng(1).standard_normal((4 * 64, 4))
    want, want_sum = attend(scores, values, 1.0, dtype, True, 64)
    for row in (0, 5, 11):
        alone = np.full_like(scores, other)
        alone[row] = scores[row]
        got, got_sum = attend(alone, values, 1.0, dtype, True, 64)
        assert np.array_equal(got[row], want[row])
        assert got_sum[row] == want_sum[row]


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("at", [1, 70])
def test_what_is_no_number_makes_a_row_nan(at: int, value: float) -> None:
    """In the first tile and in a later one; no other row notices."""
    scores = some_scores("wild", 2 * 64, 64)
    scores[4, at] = value
    mean, total = attend(scores, np.ones((2 * 64, 4)), 1.0, torch.bfloat16, True, 64)
    assert np.isnan(mean[4]).all()
    assert np.isnan(total[4])
    assert np.isfinite(np.delete(mean, 4, 0)).all()


@pytest.mark.parametrize("softcap", [50.0, 30.0, 2.0, 1e-30])
def test_powers_of_capped_logits(softcap: float) -> None:
    """Half of them by a polynomial: keys with an even number, in every row."""
    draw, n = np.random.default_rng(0), 64
    x, scale = draw.uniform(-1, 1, (n, 32)).astype(np.float32), np.float32(softcap * math.log2(math.e))
    x[:4], x[4:8], x[8:12], x[12:16], x[16:20] = 1, -1, 0, -np.inf, np.nan
    operands = dict(enumerate([*x, *np.full((n, 32), scale)], n))
    got = run(str(_powers_asm(n, SHARE.value)), operands)
    power = np.stack([got[i] for i in range(n)])
    with np.errstate(all="ignore"):
        error = np.abs(power / np.exp2(x.astype(np.float64) * scale) - 1)
    seen = np.isfinite(x).all(1)
    even = np.arange(n) % 2 == 0  # a thread has two keys of a row side by side
    assert error[seen & even].max() < 2**-13
    assert error[seen & ~even].max() < 2**-18  # of which the product that is the exponent is rounded
    assert (power[12:16] == 0).all()
    assert not np.isfinite(power[16:20]).any()

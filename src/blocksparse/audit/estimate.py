"""An estimate with its confidence interval, from a random sample of queries."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import final

from attrs import frozen
from torch import Tensor


@final
@frozen
class Estimate:
    """A number that was estimated, and the interval that holds the true one with the confidence asked for."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} - {self.high:.4f})"


def ratio(numerator: Tensor, denominator: Tensor, *, confidence: float) -> Estimate:
    """`sum(numerator) / sum(denominator)` of a population, from `n` random members of it.

    The interval is Student's, for the mean of the linearised ratio, with Hall's transformation: a few queries have
    most of the error, and the plain interval of so skewed a sample ends too low. (P. Hall, On the removal of
    skewness by transformation, Journal of the Royal Statistical Society B 54, 1992.)

    Args:
        numerator: `[n]` float64 on the CPU.
        denominator: `[n]` float64 on the CPU.
        confidence: how often the interval holds the true ratio.
    """
    n = len(numerator)
    top, bottom = float(numerator.sum()), float(denominator.sum())
    if bottom == 0:
        value = 0.0 if top == 0 else math.inf
        return Estimate(value, value, value)
    value = top / bottom
    off = (numerator - value * denominator) / denominator.mean()  # their mean is 0
    spread = float(off.square().sum() / (n - 1)) ** 0.5
    if not math.isfinite(spread) or spread == 0:
        return Estimate(value, value, value)
    skewness = float((off / spread).pow(3).mean())
    quantile = _student((1 + confidence) / 2, n - 1)
    unit = spread / math.sqrt(n)
    low, high = (value - unit * _untransformed(side * quantile, skewness, n) for side in (1, -1))
    return Estimate(value, low, high)


def _untransformed(x: float, skewness: float, n: int) -> float:
    """The studentised mean that Hall's transformation takes to `x`; `x` itself where nothing is skewed."""
    bend = skewness / math.sqrt(n)
    if abs(bend) < 1e-6:
        return x
    return 3 / bend * (math.cbrt(1 + bend * (x - bend / 6)) - 1)


def _student(p: float, freedom: int) -> float:
    """The quantile of Student's t, by its expansion at the normal one, for 15 degrees of freedom or more."""
    z = NormalDist().inv_cdf(p)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3

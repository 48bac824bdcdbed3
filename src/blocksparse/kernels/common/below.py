"""Heads of which somebody asks for something: those whose number lies below a bound, or all others.

A kernel that is told so leaves the other heads out, without the host knowing which they are.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Below(NamedTuple):
    """The heads whose number is below a bound, or with `others` the heads where it is not; a NaN is not."""

    number: Tensor  # [B, H]
    bound: Tensor  # [1, H|1, 1, 1] float64
    others: bool = False

    def rest(self) -> Below:
        """The heads that these are not."""
        return self._replace(others=not self.others)

    def these(self) -> Tensor:
        """`[B, H, 1, 1]` bool, in plain torch."""
        below = self.number[..., None, None] < self.bound
        return ~below if self.others else below

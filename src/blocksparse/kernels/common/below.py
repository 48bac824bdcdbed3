"""Heads of which somebody asks for something: those whose number lies below a bound, or all others.

A kernel that is told so leaves the other heads out, without the host knowing which they are.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blocksparse.kernels.common.strides_triton import head_strides


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


def asked(heads: Below | None) -> tuple[Tensor | None, Tensor | None, int | None]:
    """What `not_asked` takes first."""
    if heads is None:
        return None, None, None
    return heads.number.contiguous(), heads.bound, head_strides(heads.bound)[1]

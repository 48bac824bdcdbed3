"""Rules of position as three numbers, which one launch works out together."""

from __future__ import annotations

from typing import NamedTuple


class Places(NamedTuple):
    """Blocks that are chosen for where they lie; None chooses none. `within_reach` takes these numbers by name."""

    near: int | None = None  # `Grid.within` so many tokens
    first: int | None = None  # `Grid.holding_first` so many tokens
    stride: tuple[int, int] | None = None  # one of so many blocks in a row, from an offset drawn with this seed

    def joined(self, other: Places) -> Places | None:
        """Both as one; None where both say how many of a kind."""
        if any(mine is not None and its is not None for mine, its in zip(self, other, strict=True)):
            return None
        return Places(
            other.near if self.near is None else self.near,
            other.first if self.first is None else self.first,
            other.stride if self.stride is None else self.stride,
        )


NOWHERE = Places()

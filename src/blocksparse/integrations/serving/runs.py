"""`Runs`: some rows of a batch, of which one range is taken as a view and several as a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor


@final
@frozen
class Runs:
    """Ranges of rows, `(first, last + 1)` each, in order and apart from one another."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[int]) -> Runs:
        """The fewest ranges that hold exactly these rows, which rise."""
        ranges: list[tuple[int, int]] = []
        for row in rows:
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + 1)
            else:
                ranges.append((row, row + 1))
        return cls(tuple(ranges))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(start, stop) for start, stop in self.ranges)

    def __str__(self) -> str:
        """`0-2, 5`."""
        return ", ".join(f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in self.ranges)

    def of_tokens(self, starts: Sequence[int]) -> Runs:
        """The tokens of these requests; those of request `i` are `starts[i]` to `starts[i + 1] - 1`."""
        ranges = [(starts[start], starts[stop]) for start, stop in self.ranges]
        return Runs(tuple((start, stop) for start, stop in ranges if stop > start))

    def take(self, x: Any) -> Any:
        """These rows of a tensor or an array: a view if they are one range."""
        parts = [x[start:stop] for start, stop in self.ranges]
        if len(parts) == 1:
            return parts[0]
        if isinstance(x, Tensor):
            return torch.cat(parts) if parts else x[:0]
        return np.concatenate(parts) if parts else x[:0]

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Write `rows` where `take` reads them. What is a view of `x` is there already."""
        if len(self.ranges) > 1:
            sizes = [stop - start for start, stop in self.ranges]
            for (start, stop), part in zip(self.ranges, rows.split(sizes), strict=True):
                x[start:stop] = part

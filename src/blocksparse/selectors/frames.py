"""Frames that all look at, and those around a query's own (LVSA, arXiv 2605.31057)."""

from __future__ import annotations

from functools import lru_cache
from typing import final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from blocksparse.checks.validators import count, maybe_whole, optional, size, whole
from blocksparse.geometry import Grid
from blocksparse.selectors.grid_selector import GridSelector


@final
@frozen(cache_hash=True)
class Frames(GridSelector):
    """Keep the first frames, one frame of every `period`, and a window of frames around a query's own.

    A window holds `2 radius + 1` frames: where the video ends it is moved, and each of its frames that is kept
    anyway is made up for by one more at its sides, left and right in turn, the left one first, until the video
    ends. Blocks that hold a cell of a kept frame are kept whole; where an order has moved cells, a block counts
    for all frames from that of its first to that of its last one.

    Args:
        grid: frames, rows and columns, as of a `GridSelector`.
        period: frames from one periodic frame to the next; None for none.
        phase: the first periodic frame. All are counted modulo the number of frames, so that there are as many
            with every phase: `ceil(T / period)`. LVSA takes the number of the denoising step modulo `period`.
        first: how many frames at the start are kept for all.
        radius: frames on either side of a query's own; None for no window, not even its own frame.
    """

    period: int | None = field(default=None, converter=maybe_whole, validator=optional(size), kw_only=True)
    phase: int = field(default=0, converter=whole, validator=count, kw_only=True)
    first: int = field(default=1, converter=whole, validator=count, kw_only=True)
    radius: int | None = field(default=None, converter=maybe_whole, validator=optional(count), kw_only=True)

    def among_cells(self, grid: Grid) -> Tensor:
        T, H, W = self.sizes
        blocks = self.blocks(grid)
        before = _counted(evolve(self, grid=(T, 1, 1), prefix=0), grid.k_first.device)
        (top, bottom), (left, right) = (
            (first // (H * W), last // (H * W) + 1)
            for first, last in ((blocks.q_first, blocks.q_last), (blocks.k_first, blocks.k_last))
        )
        # A block is a rectangle of pairs of frames.
        inside: Tensor = before[bottom, right] - before[top, right] - before[bottom, left] + before[top, left]
        return inside > 0

    def among_frames(self) -> list[set[int]]:
        """The frames that the queries of each frame look at."""
        T = self.sizes[0]
        shared = set(range(min(self.first, T)))
        if self.period is not None:
            shared |= {(self.phase + i * self.period) % T for i in range(-(-T // self.period))}
        if self.radius is None:
            return [shared] * T
        own = min(2 * self.radius + 1, T - len(shared))  # frames of a window that are not shared
        return [shared | self._window(frame, shared, own) for frame in range(T)]

    def _window(self, frame: int, shared: set[int], own: int) -> set[int]:
        T, W = self.sizes[0], self.radius or 0
        low, high = max(0, min(frame - W, T - 1 - 2 * W)), min(T - 1, max(frame + W, 2 * W))
        left = True
        while len(set(range(low, high + 1)) - shared) < own:
            if left and low > 0:
                low -= 1
            elif not left and high < T - 1:
                high += 1
            left = not left
        return set(range(low, high + 1))


@lru_cache(maxsize=256)
def _counted(frames: Frames, device: torch.device) -> Tensor:
    """Number of kept frame pairs before frame `i` and before frame `j`, `[T + 1, T + 1]` int64.

    It stays on the device for later calls, which then wait for no copy from the host.
    """
    T = frames.sizes[0]
    kept = torch.zeros(T + 1, T + 1, dtype=torch.int64, device="cpu")
    for frame, seen in enumerate(frames.among_frames()):
        kept[frame + 1, [i + 1 for i in seen]] = 1
    return kept.cumsum(0).cumsum(1).to(device)

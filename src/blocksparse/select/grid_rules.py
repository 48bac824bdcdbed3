"""Rules of position on the cells of a video: frames, tiles and distances between them."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from math import prod
from typing import NamedTuple, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from blocksparse.check.validators import Rule, count, is_whole, maybe_whole, optional, positive, real, size, whole
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import for_heads
from blocksparse.order.grid_orders import OnGrid, three, three_sizes
from blocksparse.select.selector import PositionSelector


class _Blocks(NamedTuple):
    """The first and the last cell of each row of blocks and of each column, counted over the whole video."""

    q_first: Tensor  # [B|1, H|1, rows, 1] int32
    q_last: Tensor
    k_first: Tensor  # [B|1, H|1, rows|1, cols]
    k_last: Tensor


@frozen(cache_hash=True)
class GridSelector(OnGrid, PositionSelector):
    """A rule on the cells of a video. Text is always kept: its keys for all queries, and all keys for its queries.

    Tokens must arrive as models flatten them: `prefix` tokens of text, then the cells frame by frame and row by
    row, then any number of tokens of text.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens, after patching. None leaves it to a host that knows
            it (`hosts.diffusers`), and the rule cannot be asked by itself.
        prefix: how many tokens of text stand before the cells.
    """

    by_row = "needs the cells of queries, and a part of a call does not know them"

    @abstractmethod
    def among_cells(self, grid: Grid) -> Tensor:
        """Mask of the blocks to keep for their cells, broadcastable to `[B, Hq, rows, cols]` bool."""

    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`.

        Raises:
            ValueError: there are fewer keys than `prefix` and cells.
        """
        T, H, W = self.sizes
        start, end = self.prefix, self.prefix + T * H * W
        if grid.k_len < end:
            raise ValueError(
                f"{type(self).__name__} needs at least {end} keys (prefix {start} + grid {T} x {H} x {W} = "
                f"{end - start}): Nk={grid.k_len}. Give the grid after patching as (T, H, W), text in front as "
                "prefix=."
            )
        text = (grid.q_first < start) | (grid.q_last >= end) | (grid.k_first < start) | (grid.k_last >= end)
        return text | self.among_cells(grid)

    def blocks(self, grid: Grid) -> _Blocks:
        """The first and the last cell of every block, as far as it holds cells."""
        cells = prod(self.sizes)
        bounds = (grid.q_first, grid.q_last, grid.k_first, grid.k_last)
        return _Blocks(*((x - self.prefix).clamp(0, cells - 1) for x in bounds))


_window = Rule(
    "three whole numbers (t, h, w), each at least 0",
    lambda x: isinstance(x, tuple) and len(x) == 3 and all(map(is_whole, x)),
    lambda x: min(x) >= 0,
)


@final
@frozen(cache_hash=True)
class TileWindow(GridSelector):
    """Keep the tiles that are at most so many tiles from a query's own in time, in height and in width.

    A block counts for all tiles in the box around its cells. So the rule is exact for blocks that are tiles
    (`TileOrder`), and keeps more in other orders. Source: NABLA, arXiv 2507.13546.

    Args:
        grid: frames, rows and columns, as in a `GridSelector`.
        radius: tiles on either side, in time, height and width.
        tile: frames, rows and columns of a tile.
    """

    radius: tuple[int, int, int] = field(default=(1, 1, 1), converter=three, validator=_window, kw_only=True)
    tile: tuple[int, int, int] = field(default=(1, 8, 8), converter=three, validator=three_sizes, kw_only=True)

    def among_cells(self, grid: Grid) -> Tensor:
        keys = grid.k_position if grid.group_of_row is None else grid.k_position[:, :, grid.group_of_row]
        q_boxes = [[x.unsqueeze(3) for x in box] for box in self._boxes(grid.q_position, grid.q_block)]
        keep = torch.ones((), dtype=torch.bool, device=keys.device)
        for (q_low, q_high), (k_low, k_high), radius in zip(
            q_boxes, self._boxes(for_heads(keys, grid.q_heads), grid.k_block), self.radius, strict=True
        ):
            keep = keep & (k_low <= q_high + radius) & (k_high >= q_low - radius)
        return keep

    def _boxes(self, position: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
        """The first and the last tile of each block `[..., blocks]` in time, in height and in width."""
        _, H, W = self.sizes
        cell = position.unflatten(-1, (-1, block)) - self.prefix
        there = (cell >= 0) & (cell < self.sizes[0] * H * W)
        coordinates = cell // (H * W), cell // W % H, cell % W
        far = max(self.sizes)
        boxes = []
        for coordinate, side in zip(coordinates, self.tile, strict=True):
            tile = coordinate // side
            boxes.append((tile.where(there, 2 * far).amin(-1), tile.where(there, -2 * far).amax(-1)))
        return boxes


@final
@frozen(cache_hash=True)
class Frames(GridSelector):
    """Keep the first frames, one frame of every `period`, and a window of frames around a query's own.

    A window holds `2 radius + 1` frames, and is moved at the ends of the video. For each of its frames that is
    kept anyway, it gets one more frame at its sides, left and right in turn, the left one first, until the video
    ends. Blocks that hold a cell of a kept frame are kept whole. Where an order has moved cells, a block counts
    for all frames from that of its first cell to that of its last. Source: LVSA, arXiv 2605.31057.

    Args:
        grid: frames, rows and columns, as in a `GridSelector`.
        period: frames from one periodic frame to the next. None for none.
        phase: the first periodic frame. All are counted modulo the number of frames, so that there are as many
            with every phase: `ceil(T / period)`. LVSA takes the number of the denoising step modulo `period`.
        first: how many frames at the start are kept for all.
        radius: frames on either side of a query's own. None for no window, not even its own frame.
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
    """Kept frame pairs before frames `i` and `j`, `[T + 1, T + 1]` int64, kept on the device for later calls."""
    T = frames.sizes[0]
    kept = torch.zeros(T + 1, T + 1, dtype=torch.int64, device="cpu")
    for frame, seen in enumerate(frames.among_frames()):
        kept[frame + 1, [i + 1 for i in seen]] = 1
    return kept.cumsum(0).cumsum(1).to(device)


@final
@frozen(cache_hash=True)
class Radial(GridSelector):
    """Keep the keys near a query's own place in its frame, within a window that halves as their frame is farther.

    The first frame, the frame of the query and its neighbours are kept whole. At a distance of `d` frames, the
    window is `L = decay * 2^b / 2^g` tokens to both sides. There `g = floor(log2 d) + 1` is the number of binary
    digits of `d`, and `b` that of the tokens per frame. It never is less than a block; where `2^b / 2^g` would be,
    only each `int(block / (2^b / 2^g))`-th distance is kept. Blocks that hold a pair of tokens which this keeps
    are kept whole. It is made for tokens in place. The first and the last token of a block decide, and where an
    order has moved tokens, more blocks are kept. Source: Radial Attention, arXiv 2506.19852, section 4.

    Args:
        grid: frames, rows and columns, as in a `GridSelector`.
        decay: the factor of all windows.
    """

    decay: float = field(default=1.0, converter=real, validator=positive, kw_only=True)

    def among_cells(self, grid: Grid) -> Tensor:
        T, H, W = self.sizes
        blocks, window = self.blocks(grid), self._windows(grid.k_block, grid.k_first.device)
        queries = _pieces(blocks.q_first, blocks.q_last, grid.q_block, H * W)
        keys = _pieces(blocks.k_first, blocks.k_last, grid.k_block, H * W)
        # A block of moved tokens may span more frames than its tokens can fill; it is kept.
        keep = (queries.frames > len(queries.pieces)) | (keys.frames > len(keys.pieces))
        for q_frame, q_from, q_to in queries.pieces:
            for k_frame, k_from, k_to in keys.pieces:
                apart = torch.maximum(k_from - q_to, q_from - k_to)  # below 0 where they overlap
                near = apart <= window[(q_frame - k_frame).abs().clamp_max(T - 1)]
                there = (q_from <= q_to) & (k_from <= k_to)
                keep = keep | ((near | (k_frame == 0)) & there)
        return keep

    def _windows(self, block: int, device: torch.device) -> Tensor:
        """The window of each distance of frames, `[T]` float64; -inf where none of its frames is kept."""
        T, H, W = self.sizes
        distance = torch.arange(T, device=device)
        bits = torch.frexp(distance.double()).exponent  # binary digits
        length = 2.0 ** ((H * W).bit_length() - bits.double())
        window = (length * self.decay).clamp_min(block)
        dropped = (length < block) & (distance % (block / length).floor().clamp_min(1).long() != 0)
        return window.masked_fill(dropped, float("-inf")).masked_fill(distance <= 1, float("inf"))


class _Pieces(NamedTuple):
    """The parts of blocks that lie in one frame each."""

    frames: Tensor  # how many frames a block spans
    pieces: list[tuple[Tensor, Tensor, Tensor]]  # of each: its frame, its first and its last cell within it


def _pieces(first: Tensor, last: Tensor, block: int, size: int) -> _Pieces:
    """The pieces of blocks that hold the cells from `first` to `last`, in frames of `size` cells."""
    frame = first // size
    pieces = []
    for i in range((block - 2) // size + 2):
        start = (frame + i) * size
        pieces.append((frame + i, (first - start).clamp_min(0), (last - start).clamp_max(size - 1)))
    return _Pieces(last // size - frame + 1, pieces)

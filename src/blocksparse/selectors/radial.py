"""Fewer and fewer keys the farther their frame is (Radial Attention, arXiv 2506.19852, section 4)."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import positive, real
from blocksparse.geometry import Grid
from blocksparse.selectors.grid_selector import GridSelector


@final
@frozen(cache_hash=True)
class Radial(GridSelector):
    """Keep the keys near a query's own place in its frame, within a window that halves as their frame is farther.

    The first frame, the frame of the query and its neighbours are kept whole. At a distance of `d` frames, of
    which `g = floor(log2 d) + 1` binary digits are written, the window is `L = decay * 2^b / 2^g` tokens to both
    sides, where `b` is the number of binary digits of the tokens per frame. It never is less than a block; where
    `2^b / 2^g` would be, only each `int(block / (2^b / 2^g))`-th distance is kept. Blocks that hold a pair of
    tokens which this keeps are kept whole. It is made for tokens in place: a block is judged by its first and its
    last token, and where an order has moved tokens, more blocks are kept.

    Args:
        grid: frames, rows and columns, as of a `GridSelector`.
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

"""Orders of image and video tokens, from their place in a grid of cells."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.check.per_head import WHOLE_DTYPES
from blocksparse.check.validators import Rule, count, is_whole, maybe_whole, optional, shown, whole
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.spec import AttentionSpec


def three(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Converter: whole numbers in a tuple become Python `int`s."""
    return tuple(map(whole, sizes)) if isinstance(sizes, tuple) else sizes  # type: ignore[return-value]


three_sizes = Rule(
    "three whole numbers (T, H, W), each at least 1",
    lambda x: isinstance(x, tuple) and len(x) == 3 and all(map(is_whole, x)),
    lambda x: min(x) >= 1,
).or_else("An image is (1, H, W).")


@frozen(cache_hash=True)
class OnGrid:
    """What stages share whose tokens stand for the cells of a video, after `prefix` tokens of text."""

    grid: tuple[int, int, int] | None = field(
        default=None, converter=converters.optional(three), validator=optional(three_sizes)
    )
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The grid.

        Raises:
            ValueError: there is none.
        """
        if self.grid is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no grid. Give it as {name}((T, H, W)) in tokens, after patching. Only "
                "hosts.diffusers.attach takes it from the model."
            )
        return self.grid


@frozen(cache_hash=True)
class GridOrder(OnGrid, Permuter[GlobalPermutation]):
    """An order of tokens that stand for the cells of a video; all heads have the same order.

    Tokens must arrive as models flatten them: `prefix` tokens of text, then the cells frame by frame and row by
    row, then `suffix` tokens of text. Only cells move. Queries get the order of the keys if they are the same
    tokens. This is so if there are as many queries as keys, or if the call is causal: its queries are the last
    tokens. In a call that is not causal and has another number of queries, the queries are other tokens (cross
    attention) and stay in place. Source: SpargeAttn, section 3.7 and appendix A.1.

    These orders are made for attention that is not causal. Causal attention is exact too, but many blocks then
    hold pairs above the diagonal. The order is computed on the device of the keys, without a copy from the host.

    Args:
        grid: frames, rows and columns `(T, H, W)` in tokens, after patching. An image is `(1, H, W)`. None leaves
            it to a host (`hosts.diffusers`). Without a host such an order cannot run.
        prefix: tokens before the cells. They stay in place.
        suffix: the same after the cells. None means any number.
    """

    suffix: int | None = field(default=0, converter=maybe_whole, validator=optional(count), kw_only=True)

    by_row = "orders all queries of a call together, and a part has some"

    @abstractmethod
    def cells(self, device: torch.device | str) -> Tensor | None:
        """The cell in each slot, `[T * H * W]` int64. Cells are counted frame by frame and row by row.

        None means that all cells stay in place.
        """

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        """The order of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`.

        Raises:
            ValueError: `N` is not the number of cells and text tokens.
        """
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        self._check_length(N)
        cells = self.cells(k.device)
        if cells is None:
            return GlobalPermutation()
        position = torch.arange(N, device=k.device)
        order = torch.cat((position[: self.prefix], self.prefix + cells, position[self.prefix + len(cells) :]))
        k_index = order.int().expand(B, Hkv, 1, N)
        if M == N:
            return GlobalPermutation(k_index, order.int().expand(B, Hq, N))
        if not spec.causal:
            return GlobalPermutation(k_index)
        # The queries are a chunk: they stand in the order in which their own keys stand.
        slot = torch.empty_like(position).scatter_(0, order, position)
        return GlobalPermutation(k_index, slot[N - M :].argsort().int().expand(B, Hq, M))

    def _check_length(self, N: int) -> None:
        T, H, W = self.sizes
        expected = self.prefix + T * H * W + (self.suffix or 0)
        if expected == N or (self.suffix is None and expected < N):
            return
        tokens = f"prefix {self.prefix} + grid {T} x {H} x {W} = {T * H * W}"
        tokens += " + any suffix" if self.suffix is None else f" + suffix {self.suffix}"
        raise ValueError(
            f"{type(self).__name__} needs {'at least ' if self.suffix is None else ''}{expected} keys "
            f"({tokens}): Nk={N}. Give the grid after patching as (T, H, W), text tokens as prefix= and suffix=."
        )


@final
@frozen(cache_hash=True)
class RasterOrder(GridOrder):
    """Leave cells in the order in which they arrive, frame by frame and row by row. The grid is still checked.

    Source: Rowmajor in SpargeAttn, appendix A.1.
    """

    def cells(self, device: torch.device | str) -> None:
        del device


@final
@frozen(cache_hash=True)
class TimeOrder(GridOrder):
    """Order cells by row and column: the cells of all frames at one row and column stand together.

    Source: Timemajor in SpargeAttn, appendix A.1.
    """

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        return torch.arange(T * H * W, device=device).view(T, H, W).permute(1, 2, 0).flatten()


@final
@frozen(cache_hash=True)
class ColumnOrder(GridOrder):
    """Order cells frame by frame, and inside a frame column by column: neighbours in the order differ in H.

    Source: Columnmajor in SpargeAttn, appendix A.1.
    """

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        return torch.arange(T * H * W, device=device).view(T, H, W).transpose(1, 2).flatten()


@final
@frozen(cache_hash=True)
class TileOrder(GridOrder):
    """Order cells tile by tile. Tiles, and the cells inside each, go frame by frame and row by row.

    A tile at a far edge holds the cells that are left. A block of tokens is one tile only if a tile has as many
    cells as a block and the tiles divide the grid. Otherwise a block may hold parts of several tiles.

    Args:
        tile: frames, rows and columns `(t, h, w)` of a tile. 4 x 4 x 4 cells make a block of 64.
    """

    tile: tuple[int, int, int] = field(default=(4, 4, 4), converter=three, validator=three_sizes)

    def cells(self, device: torch.device | str) -> Tensor:
        (_, H, W), (t, h, w) = self.sizes, map(min, self.tile, self.sizes)
        frame, row, column = (torch.arange(size, device=device) for size in self.sizes)
        across, down = -(-W // w), -(-H // h)
        tile = (frame[:, None, None] // t * down + row[:, None] // h) * across + column // w  # [T, H, W]
        return tile.flatten().argsort(stable=True)


@final
@frozen(cache_hash=True)
class HilbertOrder(GridOrder):
    """Cells along a Hilbert curve: a block of tokens is a compact piece of the video (SpargeAttn, section 3.7).

    The curve is that of the smallest cube which contains the grid and whose side is a power of two; cells outside
    the grid are left out. If the grid is such a cube, every step leads to a neighbour. In other grids a few steps
    do not (1.5 % of those of 13 x 30 x 45). Axes of size 1 are ignored, so an image gets the curve of a square.
    """

    def cells(self, device: torch.device | str) -> Tensor:
        T, H, W = self.sizes
        cell = torch.arange(T * H * W, device=device)
        axes = [cell // (H * W), cell // W % H, cell % W]
        axes = [x for x, size in zip(axes, self.sizes, strict=True) if size > 1]
        return hilbert_index(axes, bits=(max(self.sizes) - 1).bit_length()).argsort() if axes else cell


def hilbert_index(axes: list[Tensor], *, bits: int) -> Tensor:
    """The index along the Hilbert curve of a cube of side `2 ** bits` of the cells with these coordinates.

    The method goes bit by bit: J. Skilling, Programming the Hilbert curve (AIP Conference Proceedings 707, 2004).

    Args:
        axes: non-negative int64 coordinates, one tensor per axis, all of one shape `[...]`.
        bits: bits per coordinate. At most 63 for all axes together.
    """
    x, n = list(axes), len(axes)
    for level in range(bits - 1, 0, -1):
        below = (1 << level) - 1
        for i in range(n):
            # In the upper half of axis i the lower bits of the first axis are inverted;
            # in the lower half axis i and the first axis exchange their lower bits.
            backwards = (x[i] >> level & 1) * below
            exchanged = (x[0] ^ x[i]) & (below - backwards)
            x[0] = x[0] ^ backwards ^ exchanged
            x[i] = x[i] ^ exchanged

    # The bits of all axes, the highest bit of each axis first, now form one Gray code, which is decoded here.
    for i in range(1, n):
        x[i] = x[i] ^ x[i - 1]
    carry, shift = x[-1], 1
    while shift < bits:
        carry, shift = carry ^ carry >> shift, 2 * shift
    x = [axis ^ carry >> 1 for axis in x]

    bit = torch.arange(bits, device=x[0].device)
    spread = [((axis.unsqueeze(-1) >> bit & 1) << bit * n).sum(-1) for axis in x]
    return sum((axis << n - 1 - i for i, axis in enumerate(spread)), torch.zeros_like(x[0]))


def _to_tensor(order: Tensor | Sequence[int]) -> Tensor:
    """Converter: a new tensor; a value that cannot be one stays as it is, for the validator to refuse."""
    if isinstance(order, Tensor):
        return order.detach().clone()  # later writes to the caller's tensor change nothing
    if isinstance(order, Sequence) and all(is_whole(cell) and 0 <= cell < 2**31 for cell in order):
        return torch.tensor([int(cell) for cell in order], dtype=torch.int64, device="cpu")
    return order  # type: ignore[return-value]


@final
@frozen(cache_hash=True)
class GivenOrder(GridOrder):
    """Cells in a given order: any custom order, or one that is computed once and used in every layer.

        GivenOrder((13, 30, 45), HilbertOrder((13, 30, 45)).cells("cuda"))

    Args:
        order: the cell in each slot, `[T * H * W]` whole numbers, each cell once. Give a tensor on the device of
            the keys. From another device it is copied in every call.
    """

    grid: tuple[int, int, int] = field(converter=three, validator=three_sizes)
    order: Tensor = field(
        converter=_to_tensor, repr=lambda order: repr(order.tolist()), eq=lambda order: tuple(order.tolist())
    )

    @order.validator
    def _names_each_cell_once(self, _: object, order: Tensor) -> None:
        T, H, W = self.sizes
        if not isinstance(order, Tensor) or order.dtype not in WHOLE_DTYPES or order.is_meta or order.is_sparse:
            raise TypeError(
                f"'order' must be a tensor or a sequence of whole numbers: {shown(order)}. "
                "Write a permutation of the cells."
            )
        if order.shape != (T * H * W,):
            raise ValueError(
                f"'order' must name {T} x {H} x {W} = {T * H * W} cells: {list(order.shape)}. Name every cell."
            )
        if not bool((order.sort().values == torch.arange(T * H * W, device=order.device)).all()):
            raise ValueError(f"'order' must name each cell from 0 to T * H * W - 1 once: {shown(order)}")

    def cells(self, device: torch.device | str) -> Tensor:
        return self.order.to(device, torch.int64)

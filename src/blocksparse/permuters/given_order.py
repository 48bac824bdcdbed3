"""Image and video tokens in an order that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.per_head import WHOLE_DTYPES
from blocksparse.checks.validators import is_whole, shown
from blocksparse.permuters.grid_order import GridOrder, three, three_sizes


def _to_tensor(order: Tensor | Sequence[int]) -> Tensor:
    """Converter: a new tensor; a value that cannot be one stays as it is, for the validator to refuse."""
    if isinstance(order, Tensor):
        return order.detach().clone()  # later writes to the caller's tensor change nothing
    if isinstance(order, Sequence) and all(is_whole(cell) and 0 <= cell < 2**31 for cell in order):
        return torch.tensor([int(cell) for cell in order], dtype=torch.int64)
    return order  # type: ignore[return-value]


def _written(order: Tensor) -> str:
    """Every entry, so that the repr is a Python expression that makes the same order."""
    return repr(order.tolist())


@final
@frozen(cache_hash=True)
class GivenOrder(GridOrder):
    """Cells in a given order: any custom order, or one that is computed once and used in every layer.

        GivenOrder((13, 30, 45), HilbertOrder((13, 30, 45)).cells("cuda"))

    Args:
        order: the cell in each place, `[T * H * W]` whole numbers, each cell once. Give a tensor on the device of
            the keys; from another device it is copied in every call.
    """

    grid: tuple[int, int, int] = field(converter=three, validator=three_sizes)
    order: Tensor = field(converter=_to_tensor, repr=_written, eq=lambda order: tuple(order.tolist()))

    @order.validator
    def _names_each_cell_once(self, _: object, order: Tensor) -> None:
        T, H, W = self.sizes
        if not isinstance(order, Tensor) or order.dtype not in WHOLE_DTYPES or order.is_meta or order.is_sparse:
            raise TypeError(f"'order' must be a tensor or a sequence of whole numbers: {shown(order)}")
        if order.shape != (T * H * W,):
            raise ValueError(f"'order' must name {T} x {H} x {W} = {T * H * W} cells: {list(order.shape)}")
        if not bool((order.sort().values == torch.arange(T * H * W, device=order.device)).all()):
            raise ValueError(f"'order' must name each cell from 0 to T * H * W - 1 once: {shown(order)}")

    def cells(self, device: torch.device | str) -> Tensor:
        return self.order.to(device, torch.int64)

"""Image and video tokens in an order that was computed before."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.permuters.grid_order import GridOrder


@final
@frozen(eq=False)
class GivenOrder(GridOrder):
    """Cells in the order given: any order of your own, or one computed once and held for every layer.

        GivenOrder((13, 30, 45), HilbertOrder((13, 30, 45)).cells("cuda"))

    Args:
        order: the cell in each place, `[T * H * W]` integers; each cell once. Keep it on the device of the keys:
            elsewhere it is copied in every call.
    """

    order: Tensor = field()

    @order.validator
    def _names_each_cell_once(self, _: object, order: Tensor) -> None:
        T, H, W = self.grid
        if not isinstance(order, Tensor) or order.is_floating_point() or order.dtype == torch.bool:
            raise TypeError(f"'order' must be a tensor of integers: {order!r}")
        if order.shape != (T * H * W,):
            raise ValueError(f"'order' must name {T} x {H} x {W} = {T * H * W} cells: {tuple(order.shape)}")
        if not bool((order.sort().values == torch.arange(T * H * W, device=order.device)).all()):
            raise ValueError("'order' must name each cell from 0 to T * H * W - 1 once")

    def cells(self, device: torch.device | str) -> Tensor:
        return self.order.to(device, torch.int64)

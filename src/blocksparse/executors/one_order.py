"""Masks in one order of keys, for executors and kernels that take no other."""

from __future__ import annotations

from typing import cast

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask


def refuse_several_orders(mask: BlockMask, kernel: str) -> None:
    """Refuse a mask whose rows read keys in orders of their own, for a kernel that gets keys in one order.

    Raises:
        ValueError: the mask has the permutation of such an order.
    """
    if not isinstance(mask.grid.permutation, GlobalPermutation):
        raise ValueError(
            f"{kernel} takes keys in one order, and rows of this mask have orders of their own, as GlobalIndexMap "
            "makes them: run it with an executor of this package"
        )


def one_order(mask: BlockMask) -> GlobalPermutation:
    """The permutation of a mask, for an executor that declares to take one order of keys, as `check` sees to."""
    return cast(GlobalPermutation, mask.grid.permutation)

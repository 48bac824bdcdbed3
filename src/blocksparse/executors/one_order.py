"""Checks that a mask has one key order, for executors and kernels that support no other."""

from __future__ import annotations

from typing import cast

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask


def refuse_several_orders(mask: BlockMask, kernel: str) -> None:
    """Reject a mask whose rows have different key orders, for a kernel that supports one key order.

    Raises:
        ValueError: the mask has the permutation of such an order.
    """
    if not isinstance(mask.grid.permutation, GlobalPermutation):
        raise ValueError(
            f"{kernel} takes keys in one order, and rows of this mask have different key orders, as from "
            "GlobalIndexMap: run it with an executor of this package"
        )


def one_order(mask: BlockMask) -> GlobalPermutation:
    """The permutation of a mask, for an executor that declares to take one order of keys, as `check` sees to."""
    return cast(GlobalPermutation, mask.grid.permutation)

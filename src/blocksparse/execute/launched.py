"""Launches of executors' kernels: over lists of blocks, with a fallback, and as a custom op under torch.compile.

A custom op takes tensors and numbers, so the permutation and the mask are taken apart for it, and put together
again when it runs. The grid of a mask follows from the permutation and the sizes of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.custom_op import as_numbers, laid_out_as, spec_of
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.grid import Grid
from blocksparse.inputs import refuse_gradients
from blocksparse.kernels.masks.arguments import Lists
from blocksparse.kernels.masks.blocks import block_lists
from blocksparse.launch.failures import LaunchError, any_failed, note, noted
from blocksparse.launch.torch_private import OpaqueBase, custom_op, opaque_object
from blocksparse.order.permutation import GlobalPermutation, Permutation
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.spec import AttentionSpec


@final
@frozen(eq=False)
class BlockPlan(Lists):
    """Lists of the key blocks that each row visits: first `full` blocks (no masked pair), then `partial` blocks.

    Each row has one list, `index` `[B, H, rows, cols]` of int16, or of int32 from 32768 columns on, and each part
    of it is ascending. `full_count` and `partial_count` are `[B, H, rows]` int32; H is Hq, or Hkv where query
    heads share one mask. Shapes do not depend on the mask, and nothing is read back to the host. Entries after a
    row's two counts have no meaning, but are valid columns. FlexAttention's `BlockMask` and flash-attn-4's
    `BlockSparseTensorsTorch` take the two parts as separate int32 lists, which are `full_index` and
    `partial_index`.
    """

    @classmethod
    def of(cls, mask: BlockMask) -> BlockPlan:
        """The lists of `mask`. Its grid says which blocks are full."""
        return cls(*block_lists(mask.keep, mask.grid), mask.grid.q_block, mask.grid.k_block)

    @property
    def full_index(self) -> Tensor:
        """A list with the full blocks from entry 0 on, `[B, H, rows, cols]` int32: `index` as it is."""
        return self.index.int()

    @property
    def partial_index(self) -> Tensor:
        """A list with the partial blocks from entry 0 on, `[B, H, rows, cols]` int32; this makes a copy."""
        cols = self.index.shape[-1]
        at = torch.arange(cols, device=self.index.device) + self.full_count.unsqueeze(-1)
        return self.index.gather(-1, at.clamp_max(cols - 1)).int()

    def to_dense(self) -> Tensor:
        """Mask of the listed blocks, `[B, H, rows, cols]` bool."""
        return listed(self.full_count + self.partial_count, self.index, self.index.shape[-1])


def listed(count: Tensor, index: Tensor, cols: int) -> Tensor:
    """The blocks that the first `count` `[B, H, rows]` entries of `index` name, `[B, H, rows, cols]` bool."""
    place = torch.arange(index.shape[-1], device=index.device)
    column = index.long().where(place < count.unsqueeze(-1), cols)
    found = torch.zeros(*index.shape[:-1], cols + 1, dtype=torch.bool, device=index.device)
    return found.scatter_(-1, column, True)[..., :cols]


_Kernel = TypeVar("_Kernel", bound=Hashable)
_Result = TypeVar("_Result")


def first_launched(
    kernels: Iterable[_Kernel], of: Hashable, run: Callable[[_Kernel], _Result], refuse: Callable[[], None]
) -> _Result:
    """The result of the first kernel that can be launched.

    Args:
        kernels: from the fastest on.
        of: device, dtypes, head dims, and what else decides.
        run: runs a kernel.
        refuse: raises an error with the reasons, if none runs.

    Raises:
        LaunchError: none can be launched, and nothing was refused.
    """
    for kernel in kernels:
        if noted((kernel, of)):
            continue
        try:
            return run(kernel)
        except LaunchError as error:
            note((kernel, of), error)
    refuse()
    raise LaunchError("no kernel can be launched. Use AutoExecutor(), which chooses another executor.")


def never_launched(kernels: Iterable[_Kernel], of: Hashable) -> list[str]:
    """The reasons why none of these kernels can be launched; empty while one may."""
    if not any_failed():
        return []
    reasons = [noted((kernel, of)) for kernel in kernels]
    return list(dict.fromkeys(why for found in reasons for why in found)) if all(reasons) else []


@final
class OpaqueExecutor(OpaqueBase):
    """An executor that torch.compile does not trace. To the graph it is an input, compared by identity."""

    def __init__(self, executor: Executor[Any, Any]) -> None:
        self.executor = executor


opaque_object(OpaqueExecutor)


def execute_op(
    opaque: OpaqueExecutor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    spec: AttentionSpec,
    rank: Tensor | None = None,
) -> AttentionOutput:
    """Put a custom op into the graph that is traced. It makes the same call of the executor when the graph runs.

    `rank` is that of a `RankedBlockMask` if the executor takes one; it then reports which blocks it visited.
    """
    grid = mask.grid
    refuse_gradients(q, k, v)
    order = grid.permutation
    out, lse, visited = _execute(
        q, k, v, mask.keep, rank, order.k_index, order.q_index, opaque, order.group, [grid.q_block, grid.k_block],
        *as_numbers(spec.scale, spec.arguments()),
    )  # fmt: skip
    visit = None if rank is None else lambda: BlockMask(visited, grid)
    return AttentionOutput(out, lse, visit)


@custom_op("blocksparse::execute")
def _execute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    rank: Tensor | None,
    k_index: Tensor | None,
    q_index: Tensor | None,
    opaque: OpaqueExecutor,
    group: int | None,
    blocks: list[int],  # slots of a block of queries, and of keys
    numbers: list[float],
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    permutation = Permutation(k_index, q_index, group=group)
    if group is None:
        permutation = GlobalPermutation(k_index, q_index)
    q_block, k_block = blocks
    spec = spec_of(numbers, sinks, q.shape[1])
    grid = Grid.of(q, k, permutation, spec, q_block=q_block, k_block=k_block)
    mask = BlockMask(keep, grid) if rank is None else RankedBlockMask(keep, grid, rank)
    given = opaque.executor(q, k, v, mask, spec)
    assert given.lse is not None  # the executors that are custom ops all give it
    visited = keep.new_empty(0) if given.visited is None else given.visited.keep.contiguous()
    return laid_out_as(q, given.out), given.lse.contiguous(), visited


@_execute.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, keep: Tensor, rank: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    out = laid_out_as(q, q.new_empty((*q.shape[:3], v.shape[-1])))
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if rank is None:
        return out, lse, keep.new_empty(0)
    return out, lse, keep.new_empty((keep.shape[0], q.shape[1], *keep.shape[2:]))

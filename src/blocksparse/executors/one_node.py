"""An executor called by itself under torch.compile: one node of the graph, as a pipeline is.

A node takes tensors and numbers, so the permutation and the mask are taken apart for it, and put together again
when it runs. The grid of a mask follows from the permutation and the sizes of its blocks.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.calls.inputs import refuse_gradients
from blocksparse.calls.opaque_call import as_numbers, laid_out_as, spec_of
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor
from blocksparse.geometry import Grid
from blocksparse.permuters.permutation import GlobalPermutation, Permutation
from blocksparse.runtime.torch_private import OpaqueBase, graph_node, opaque_object
from blocksparse.selectors.block_mask import BlockMask, RankedBlockMask


@final
class OneNode(OpaqueBase):
    """An executor that torch.compile does not trace. To the graph it is an input, compared by identity."""

    def __init__(self, executor: Executor[Any, Any]) -> None:
        self.executor = executor


opaque_object(OneNode)


def one_node(
    node: OneNode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    spec: AttentionSpec,
    rank: Tensor | None = None,
) -> AttentionOutput:
    """Put a node into the graph that is being traced. It makes the same call of the executor when the graph runs.

    `rank` is that of a `RankedBlockMask` if the executor takes one; it then reports which blocks it visited.
    """
    grid = mask.grid
    refuse_gradients(q, k, v)
    order = grid.permutation
    out, lse, visited = _execute(
        q, k, v, mask.keep, rank, order.k_index, order.q_index, node, order.group, [grid.q_block, grid.k_block],
        *as_numbers(spec.scale, spec.arguments()),
    )  # fmt: skip
    visit = None if rank is None else lambda: BlockMask(visited, grid)
    return AttentionOutput(out, lse, visit)


@graph_node("blocksparse::execute")
def _execute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    rank: Tensor | None,
    k_index: Tensor | None,
    q_index: Tensor | None,
    node: OneNode,
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
    given = node.executor(q, k, v, mask, spec)
    assert given.lse is not None  # the executors that have a node all give it
    visited = keep.new_empty(0) if given.visited is None else given.visited.keep.contiguous()
    return laid_out_as(q, given.out), given.lse.contiguous(), visited


@_execute.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, keep: Tensor, rank: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    out = laid_out_as(q, q.new_empty((*q.shape[:3], v.shape[-1])))
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if rank is None:
        return out, lse, keep.new_empty(0)
    return out, lse, keep.new_empty((keep.shape[0], q.shape[1], *keep.shape[2:]))

"""Masks from and for the block-sparse kernels of others: FlexAttention, flash-attn-4 and FlashInfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blocksparse.check.validators import a, count, flag, shown
from blocksparse.execute.executor import refuse_several_orders
from blocksparse.execute.flex import to_flex as to_flex
from blocksparse.execute.launched import listed
from blocksparse.execute.packages import to_flash_attention_4 as to_flash_attention_4
from blocksparse.grid import Grid
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

if TYPE_CHECKING:  # FlexAttention brings Dynamo, which takes longer to import than all of this package
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

_PAIRS_AT_ONCE = 1 << 22


def from_flex(block_mask: FlexBlockMask, q: Tensor, k: Tensor, *, causal: bool) -> BlockMask:
    """The mask of a `BlockMask` of FlexAttention, for any executor: tokens stay in place.

        mask = from_flex(block_mask, q, k, causal=True)
        out = TritonExecutor()(q, k, v, mask, AttentionSpec(scale=D**-0.5)).out

    A mask here is a set of blocks and, perhaps, the causal rule. So `mask_mod` is evaluated on every pair of the
    blocks to which FlexAttention applies it. A pair on which the two differ is an error.

    Args:
        block_mask: over the tokens of q and k in their order.
        q: queries of the call. `[B, Hq, M, D]`.
        k: keys of the call. `[B, Hkv, N, D]`.
        causal: whether query `i` sees no key after position `N - M + i`.

    Raises:
        ValueError: the mask is for tensors of other sizes, or needs more than blocks and the causal rule, such as
            windows and documents inside a block.
    """
    flag.check(causal=causal)
    q_block, k_block = block_mask.BLOCK_SIZE
    B, Hq, M, N = *q.shape[:3], k.shape[2]
    its_batch, its_heads = block_mask.kv_num_blocks.shape[:2]
    if block_mask.seq_lengths != (M, N) or its_batch not in (1, B) or its_heads not in (1, Hq):
        its = its_batch, its_heads, *block_mask.seq_lengths
        raise ValueError(
            f"'block_mask' was made for (B, Hq, M, N) = {its}, and q and k have {(B, Hq, M, N)}. Make it again."
        )
    spec = AttentionSpec(scale=1.0, causal=causal)  # a grid asks for no scale
    grid = Grid.of(q, k, GlobalPermutation(), spec, q_block=q_block, k_block=k_block)
    if grid.q_lead:
        raise ValueError(
            f"{M} queries at the end of {N} tokens must start at a block of {q_block} tokens: they start at "
            f"{N - M}. Causal rows are counted from token 0."
        )
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices, grid.cols)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, grid.cols)
    hidden = full & (grid.k_last > grid.q_first) if causal else torch.zeros_like(full)
    if bool(hidden.any()):
        b, h, row, col = hidden.nonzero()[0].tolist()
        raise ValueError(
            f"'block_mask' allows all pairs of block ({row}, {col}) in head {h} of entry {b}, and causality "
            "forbids some of them. Say causal=False."
        )
    # A mask that was made for one head may have a function that tells heads apart all the same.
    _check_pairs(block_mask, partial.expand(B, Hq, -1, -1), N - M if causal else None)
    keep = (partial | full) & grid.visible
    return BlockMask(keep.expand(B, Hq, -1, -1), grid)


def _check_pairs(block_mask: FlexBlockMask, partial: Tensor, offset: int | None) -> None:
    """Refuse a mask whose `mask_mod` differs from the causal rule, for queries from `offset` on."""
    (q_block, k_block), (M, N) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    place = torch.arange(q_block * k_block, device=partial.device)
    listed = partial.nonzero()
    for blocks in listed.split(max(1, _PAIRS_AT_ONCE // len(place))) if len(listed) else ():
        b, h, row, col = blocks.unsqueeze(-1).unbind(1)  # [blocks, 1]
        query, slot = row * q_block + place // k_block, col * k_block + place % k_block
        b, h, query, slot = (x.expand_as(query)[(query < M) & (slot < N)] for x in (b, h, query, slot))
        allowed = torch.vmap(block_mask.mask_mod)(b, h, query, slot)
        expected = slot <= query + offset if offset is not None else torch.ones_like(allowed)
        if bool((wrong := allowed != expected).any()):
            first = int(wrong.nonzero()[0])
            where = f"query {int(query[first])} and key {int(slot[first])} in head {int(h[first])}"
            said = "allows" if bool(allowed[first]) else "forbids"
            rule = "all pairs of a block" if offset is None else "the pairs of a block that causality allows"
            raise ValueError(
                f"'block_mask' {said} {where} of entry {int(b[first])}, and a mask of blocks means {rule}. "
                f"{'Say causal=True, or leave' if offset is None else 'Leave'} such rules to FlexAttention itself"
            )


class FlashInferBlocks(NamedTuple):
    """Arguments of FlashInfer's `VariableBlockSparseAttentionWrapper.plan` for one entry of a batch."""

    block_mask_map: Tensor  # [Hkv, rows, cols] bool
    block_row_sz: Tensor  # [Hkv, rows] int32, the queries in each row
    block_col_sz: Tensor  # [Hkv, cols] int32, the keys in each column

    def lists(self, head: int) -> tuple[Tensor, Tensor]:
        """`indptr` `[rows + 1]` and `indices` of one KV head, int32: for `BlockSparseAttentionWrapper.plan`.

        Their length depends on the mask, so on a GPU the host waits.
        """
        keep = self.block_mask_map[head]
        ends = keep.sum(-1).cumsum(0)
        return torch.cat((ends.new_zeros(1), ends)).int(), keep.nonzero()[:, 1].int()


def to_flashinfer(mask: BlockMask, *, entry: int = 0) -> FlashInferBlocks:
    """A mask for FlashInfer's block-sparse kernels, which take queries and keys in slot order.

    Args:
        mask: one for each KV head, as `SharedByGroup` makes them for grouped queries.
        entry: of the batch. These kernels have none.

    Raises:
        ValueError: query heads of a group have different masks, or rows of the mask read keys in different orders.
            Or causality forbids pairs of a kept block, which these kernels would attend to.
    """
    a(BlockMask).check(mask=mask)
    count.check(entry=entry)
    refuse_several_orders(mask, "FlashInfer")
    grid = mask.grid
    if mask.keep.shape[1] != grid.kv_heads:
        raise ValueError(
            f"FlashInfer takes one mask per KV head, and this one has {mask.keep.shape[1]} for {grid.kv_heads}. "
            "Use SharedByGroup, or mask.share_heads()."
        )
    if entry >= grid.batch:
        raise ValueError(
            f"'entry' must be less than the batch of {grid.batch}: {shown(entry)}. Entries count from 0."
        )
    hides = grid.causal and grid.k_last > grid.q_first
    if grid.window is not None:
        hides = hides | (grid.k_first <= grid.q_last - grid.window)
    if grid.causal and bool((mask.keep & hides).any()):
        raise ValueError(
            "FlashInfer's block-sparse kernels attend to all pairs of a block, and causality forbids some pairs "
            "of this mask. Call the pipeline with causal=False, or run it with an executor of this package."
        )
    sizes = (
        (position[0, 0].unflatten(-1, (-1, block)) >= 0).sum(-1, dtype=torch.int32).expand(grid.kv_heads, -1)
        for position, block in ((grid.q_position, grid.q_block), (grid.k_position[:, :, 0], grid.k_block))
    )
    return FlashInferBlocks(mask.keep[entry].contiguous(), *(x.contiguous() for x in sizes))

"""Kept keys gathered row by row, and dense attention over them: the default on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.kernels.multiplying.products import products, wide_dtype
from blocksparse.permuters.permutation import Permutation
from blocksparse.selectors.block_mask import BlockMask

_WORKSPACE = 2**20  # logits that are held at a time, so that they stay in the caches
_PLACES = 256  # queries of a row that are computed at a time


@final
@frozen(eq=False)
class CpuExecutor(Executor[Permutation, BlockMask]):
    """Gather the keys that a row of blocks keeps, then attend to them densely, many rows at a time.

    It needs no compiler, so the first call takes no longer than the next one. It takes any permutation, dtype and
    head dim, computes in fp32 or better, and holds the keys of a few rows at a time.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        return [] if q.device.type == "cpu" else [f"it runs on a CPU, and these tensors are on {q.device.type}"]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: Permutation, mask: BlockMask, *, scale: float
    ) -> AttentionOutput:
        self.check(q, k, v, permutation, mask, hint="Use TritonExecutor() or AutoExecutor() on a GPU.")
        grid, plan = mask.grid, BlockPlan.of(mask)
        rows = _Rows(mask, permutation.gather_queries(q), k, v)
        out = rows.q.new_zeros(*rows.q.shape[:2], v.shape[-1])
        lse = rows.q.new_full(rows.q.shape[:2], float("-inf"))
        for some, blocks, partial in rows.alike(plan):
            out[some], lse[some] = rows.attention(some, blocks, partial, scale)
        inside = slice(grid.q_lead, grid.q_lead + grid.q_len)
        out, lse = (permutation.restore(rows.by_head(x)[:, :, inside]) for x in (out.to(v.dtype), lse))
        return AttentionOutput(out, lse)


class _Rows:
    """The rows of a mask one behind another; a row has the query places of all heads that share its mask."""

    def __init__(self, mask: BlockMask, queries: Tensor, k: Tensor, v: Tensor) -> None:
        grid, dtype = mask.grid, wide_dtype(queries)
        (B, Hm), (Hkv, N) = mask.keep.shape[:2], k.shape[1:3]
        # Heads that share a mask may still have key orders of their own; then each has rows of its own.
        self.copies = max(grid.k_position.shape[1] // Hm, 1)
        Hm *= self.copies
        # A mask of one row, or of one column, has blocks that may be far longer than the prompt.
        q_block = grid.q_block if grid.rows > 1 else grid.q_lead + grid.q_len
        k_block = grid.k_block if grid.cols > 1 else grid.slots
        self.shape = B, Hm, grid.q_heads // Hm, grid.rows, q_block
        self.causal = grid.causal
        after = grid.rows * q_block - grid.q_lead - grid.q_len
        if grid.q_lead or after:
            queries = pad(queries, (0, 0, grid.q_lead, after))
        self.q = self.by_row(queries).to(dtype)  # [R, positions, D], R = B Hm rows
        self.k, self.v = (x.to(dtype).flatten(0, 2) for x in (k, v))  # [B Hkv N, D] and [B Hkv N, Dv]
        # The original position of every place, [R, places], -1 where empty; and the key in every slot of the
        # blocks of a map, [maps, cols, k_block], -1 where empty.
        self.q_at = self.by_row(grid.q_position[..., : grid.rows * q_block].expand(B, grid.q_heads, -1))
        self.k_at = grid.k_position[..., : grid.cols * k_block].unflatten(-1, (-1, k_block)).flatten(0, 2)
        b, h, row = torch.meshgrid(
            *(torch.arange(n, device=queries.device) for n in (B, Hm, grid.rows)), indexing="ij"
        )
        maps_b, maps_h, maps = grid.k_position.shape[:3]
        group = 0 * row if grid.group_of_row is None else grid.group_of_row.expand_as(row)
        self.map_of = ((b % maps_b * maps_h + h * maps_h // Hm) * maps + group).flatten()  # [R], into `k_at`
        self.first_key = ((b * Hkv + h * Hkv // Hm) * N).flatten()  # [R], into `k` and `v`

    def by_row(self, x: Tensor) -> Tensor:
        """`[B, Hq, rows * q_block, ...]` as `[R, positions, ...]`."""
        B, Hm, per, rows, q_block = self.shape
        x = x.reshape(B, Hm, per, rows, q_block, *x.shape[3:])
        return x.transpose(2, 3).reshape(B * Hm * rows, per * q_block, *x.shape[5:])

    def by_head(self, x: Tensor) -> Tensor:
        """And back."""
        B, Hm, per, rows, q_block = self.shape
        x = x.reshape(B, Hm, rows, per, q_block, *x.shape[2:])
        return x.transpose(2, 3).reshape(B, Hm * per, rows * q_block, *x.shape[5:])

    def alike(self, plan: BlockPlan) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Batches of rows that keep equally many blocks.

        Yields:
            The rows, `[n]`; their blocks, `[n, blocks]`, full ones first; and how many of the last blocks are
            partial in some row of the batch. In the other rows, some of those are full.
        """
        full, partial, index = (
            x.repeat_interleave(self.copies, 1) for x in (plan.full_count, plan.partial_count, plan.index)
        )
        count, partial = (full + partial).flatten(), partial.flatten()
        index, positions, threads = index.flatten(0, 2), min(self.q.shape[1], _PLACES), torch.get_num_threads()
        for blocks in count.unique().tolist():
            if blocks:
                at_once = _WORKSPACE // (blocks * self.k_at.shape[-1] * positions)
                at_once = at_once // threads * threads or max(at_once, 1)
                for some in (count == blocks).nonzero().flatten().split(at_once):
                    yield some, index[some, :blocks].long(), int(partial[some].max())

    def attention(self, some: Tensor, blocks: Tensor, partial: int, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of some rows to the pairs of their blocks that positions allow, and its lse."""
        slots = self.k_at[self.map_of[some, None], blocks].flatten(1)  # [n, slots]
        token = (slots.clamp_min(0) + self.first_key[some, None]).flatten()
        k, v = (x.index_select(0, token).unflatten(0, slots.shape) for x in (self.k, self.v))  # [n, slots, D]
        parts = zip(self.q[some].split(_PLACES, 1), self.q_at[some].split(_PLACES, 1), strict=True)
        each = [self._attention(q, q_at, k, v, slots, partial, scale) for q, q_at in parts]
        out, lse = zip(*each, strict=True)
        return torch.cat(out, 1), torch.cat(lse, 1)

    def _attention(
        self, q: Tensor, q_at: Tensor, k: Tensor, v: Tensor, slots: Tensor, partial: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The same for some positions, `q` `[n, positions, D]`; overwrites the values of empty slots."""
        logits = products(q.unsqueeze(0), k.unsqueeze(0))[0].mul_(scale)  # [n, positions, slots]
        if partial:
            last = slots[:, None, -partial * self.k_at.shape[-1] :]
            allowed = (last >= 0) & (last <= q_at.unsqueeze(2)) if self.causal else last >= 0
            logits[..., -last.shape[-1] :].masked_fill_(~allowed, float("-inf"))
            # An empty slot reads key 0; its weight is 0, which must not meet an infinite value.
            v[:, -last.shape[-1] :].masked_fill_((last < 0).mT, 0.0)
        peak = logits.amax(-1, keepdim=True)
        weight = logits.softmax(-1)
        lse = peak - weight.amax(-1, keepdim=True).log()  # the greatest weight is 1 / sum(exp(logits - peak))
        if bool((nothing := peak == float("-inf")).any()):  # queries that see none of these keys
            weight.masked_fill_(nothing, 0.0)
            lse.masked_fill_(nothing, float("-inf"))
        return products(weight.unsqueeze(0), v.mT.unsqueeze(0))[0], lse.squeeze(-1)

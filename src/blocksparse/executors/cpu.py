"""Kept keys gathered row by row, and dense attention over them: the default on a CPU."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.kernels.attention.flash_on_cpu import flash_on_cpu
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.multiplying.products import products, wide_dtype
from blocksparse.permuters.permutation import Permutation
from blocksparse.selectors.block_mask import BlockMask

_WORKSPACE = 2**20  # numbers that are held at a time, so that they stay in the caches
_PLACES = 256  # queries of a row whose logits are held at a time


@final
@frozen(eq=False)
class CpuExecutor(Executor[Permutation, BlockMask]):
    """Gather the keys that a row of blocks keeps, then attend to them densely, many rows at a time.

    All queries of a row see the keys that stand before the first of them. To those they attend by one call of
    PyTorch's flash kernel, without a mask; to their own tokens by another one, or by plain products where some of
    those are dropped or stand in another order. Nothing is compiled, so the first call takes no longer than the
    next one. It takes any permutation, dtype and head dim, computes in fp32 or better, and holds the keys of a few
    rows at a time.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        return [] if q.device.type == "cpu" else [f"it runs on a CPU, and these tensors are on {q.device.type}"]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: Permutation, mask: BlockMask, *, scale: float
    ) -> AttentionOutput:
        self.check(q, k, v, permutation, mask, hint="Use TritonExecutor() or AutoExecutor() on a GPU.")
        rows = _Rows(mask, permutation.gather_queries(q), k, v)
        rows.attend(scale)
        grid = mask.grid
        inside = slice(grid.q_lead, grid.q_lead + grid.q_len)
        out, lse = (rows.by_head(x)[:, :, inside] for x in (rows.out[..., : v.shape[-1]].to(v.dtype), rows.lse))
        return AttentionOutput(permutation.restore(out), permutation.restore(lse))


class _Rows:
    """The rows of a mask; a row has the query places of all heads that share its mask.

    Rows that have equally many keys lie together, so that they are computed together without being moved.
    """

    def __init__(self, mask: BlockMask, queries: Tensor, k: Tensor, v: Tensor) -> None:
        grid, plan, device = mask.grid, BlockPlan.of(mask), queries.device
        (B, Hm), (Hkv, N) = mask.keep.shape[:2], k.shape[1:3]
        # Heads that share a mask may still have key orders of their own; then each has rows of its own.
        copies = max(grid.k_position.shape[1] // Hm, 1)
        Hm *= copies
        # A mask of one row, or of one column, has blocks that may be far longer than the prompt.
        q_block = grid.q_block if grid.rows > 1 else grid.q_lead + grid.q_len
        k_block = grid.k_block if grid.cols > 1 else grid.slots
        self.shape = B, Hm, grid.q_heads // Hm, grid.rows, q_block
        self.full, partial, index = (
            x.repeat_interleave(copies, 1).flatten(0, 2).int()
            for x in (plan.full_count, plan.partial_count, plan.index)
        )  # how many blocks a row keeps, [R] with R = B Hm rows; and which, full ones first, [R, cols]
        self.kept = self.full + partial

        # The key in every slot of the blocks of all maps, [maps * cols, k_block], -1 where empty.
        self.k_at = grid.k_position[..., : grid.cols * k_block].unflatten(-1, (-1, k_block)).flatten(0, 3)
        b, h, row = torch.meshgrid(*(torch.arange(n, device=device) for n in (B, Hm, grid.rows)), indexing="ij")
        maps_b, maps_h, maps = grid.k_position.shape[:3]
        group = 0 * row if grid.group_of_row is None else grid.group_of_row.expand_as(row)
        map_of = ((b % maps_b * maps_h + h * maps_h // Hm) * maps + group).flatten()
        self.block = map_of.int().unsqueeze(1) * grid.cols + index  # into `k_at`
        self.first_key = ((b * Hkv + h * Hkv // Hm) * N).flatten()  # of the head of a row, in `k` and `v`

        # The original position of every place, [R, places], -1 where empty, and of the first and the last query of
        # each row, [R]. When not causal, every query sees as much as one that stands behind all keys.
        q_at = grid.q_position[..., : grid.rows * q_block].expand(B, grid.q_heads, -1)
        self.q_at = self.by_row(q_at if grid.causal else torch.full_like(q_at, FAR))
        self.first, self.last = self.q_at.where(self.q_at >= 0, FAR).amin(1), self.q_at.amax(1)

        before, own = self._counts()
        each = self.first[:, None] + torch.arange(q_block, dtype=torch.int32, device=device)
        in_order = (self.q_at.unflatten(1, (-1, q_block)) == each.unsqueeze(1)).flatten(1).all(1)
        kinds = torch.stack((before, own, in_order & (own == q_block)), dim=1)
        self.kinds, kind, self.sizes = kinds.unique(dim=0, return_inverse=True, return_counts=True)
        self.order = kind.argsort(stable=True)

        if after := grid.rows * q_block - grid.q_lead - grid.q_len or grid.q_lead:
            queries = pad(queries, (0, 0, grid.q_lead, after))
        width = max(k.shape[-1], v.shape[-1])  # the flash kernel takes one head dim for all
        self.q, self.k, self.v = (
            (pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x).to(wide_dtype(x))
            for x in (self.by_row(queries)[self.order], k.flatten(0, 2), v.flatten(0, 2))
        )  # [R, places, width], and [B Hkv N, width]
        self.out = torch.zeros_like(self.q)
        self.lse = self.q.new_full(self.q.shape[:2], float("-inf"))

    def by_row(self, x: Tensor) -> Tensor:
        """`[B, Hq, rows * q_block, ...]` as `[R, places, ...]`."""
        B, Hm, per, rows, q_block = self.shape
        x = x.reshape(B, Hm, per, rows, q_block, *x.shape[3:])
        return x.transpose(2, 3).reshape(B * Hm * rows, per * q_block, *x.shape[5:])

    def by_head(self, x: Tensor) -> Tensor:
        """And back, from the order in which rows lie."""
        B, Hm, per, rows, q_block = self.shape
        x = torch.empty_like(x).index_copy_(0, self.order, x)
        x = x.reshape(B, Hm, rows, per, q_block, *x.shape[2:])
        return x.transpose(2, 3).reshape(B, Hm * per, rows * q_block, *x.shape[5:])

    def _counts(self) -> tuple[Tensor, Tensor]:
        """How many kept keys stand before the first query of each row, and how many from there to its last, `[R]`."""
        partial, k_block = self.kept - self.full, self.k_at.shape[-1]
        before, own = self.full * k_block, torch.zeros_like(self.full)
        for blocks in partial.unique().tolist():
            which = (partial == blocks).nonzero().flatten()
            for some in which.split(max(_WORKSPACE // (blocks * k_block), 1)) if blocks else ():
                full, first, last = (x[some, None] for x in (self.full, self.first, self.last))
                place = full + torch.arange(blocks, device=some.device)
                at = self.k_at[self.block[some].gather(1, place)].flatten(1)
                before[some] += ((at >= 0) & (at < first)).sum(1, dtype=torch.int32)
                own[some] += ((at >= first) & (at <= last)).sum(1, dtype=torch.int32)
        return before, own

    def attend(self, scale: float) -> None:
        """Compute `out` and `lse`, some rows of a kind at a time."""
        end, threads = 0, torch.get_num_threads()
        for (before, own, in_order), size in zip(self.kinds.tolist(), self.sizes.tolist(), strict=True):
            begin, end = end, end + size
            wide = 2 * (before + own) * self.k.shape[-1] + (0 if in_order else own * min(self.q.shape[1], _PLACES))
            if wide:
                at_once = _WORKSPACE // wide
                at_once = at_once // threads * threads or max(at_once, 1)
                for start in range(begin, end, at_once):
                    rows = slice(start, min(start + at_once, end))
                    self.out[rows], self.lse[rows] = self._attention(rows, before, own, bool(in_order), scale)

    def _attention(self, rows: slice, before: int, own: int, in_order: bool, scale: float) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of some rows of a kind."""
        some, q = self.order[rows], self.q[rows]
        first, last, full, kept = (x[some, None, None] for x in (self.first, self.last, self.full, self.kept))
        place = torch.arange(int(kept.max()), device=some.device).unsqueeze(1)
        at = self.k_at[self.block[some, : len(place)]]  # [n, blocks, k_block]
        if before:
            seen = (place < full) | ((place < kept) & (at >= 0) & (at < first))
            k, v = self._gathered(some, at[seen].view(-1, before))
            out, lse = (x.squeeze(1) for x in flash_on_cpu(q.unsqueeze(1), k, v, scale))
        if not own:
            return out, lse
        if in_order:
            k, v = self._gathered(some, first.squeeze(2) + torch.arange(own, device=some.device))
            heads = q.unflatten(1, (-1, own))
            own_out, own_lse = (x.flatten(1, 2) for x in flash_on_cpu(heads, k, v, scale, causal=True))
        else:
            at = at[(place >= full) & (place < kept) & (at >= first) & (at <= last)].view(-1, own)
            own_out, own_lse = _masked_attention(q, *self._gathered(some, at), self.q_at[some], at, scale)
        if not before:
            return own_out, own_lse
        share = torch.sigmoid(lse - own_lse).masked_fill_(own_lse == float("-inf"), 1.0)
        return torch.lerp(own_out, out, share.unsqueeze(2)), torch.logaddexp(lse, own_lse)

    def _gathered(self, some: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at the positions `at` `[n, keys]` of some rows, `[n, keys, width]` each."""
        token = (at + self.first_key[some, None]).flatten()
        k, v = (x.index_select(0, token).unflatten(0, at.shape) for x in (self.k, self.v))
        return k, v


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[n, places, D]` to those of `k` `[n, keys, D]` whose position is at most theirs, and its lse."""
    parts = []
    for some, their_at in zip(q.split(_PLACES, 1), q_at.split(_PLACES, 1), strict=True):
        logits = products(some.unsqueeze(0), k.unsqueeze(0))[0].mul_(scale)  # [n, places, keys]
        logits.masked_fill_(k_at.unsqueeze(1) > their_at.unsqueeze(2), float("-inf"))
        peak = logits.amax(-1, keepdim=True)
        weight = logits.softmax(-1)
        lse = peak - weight.amax(-1, keepdim=True).log()  # the greatest weight is 1 / sum(exp(logits - peak))
        nothing = peak == float("-inf")  # queries that see none of these keys
        weight.masked_fill_(nothing, 0.0)
        lse.masked_fill_(nothing, float("-inf"))
        parts.append((products(weight.unsqueeze(0), v.mT.unsqueeze(0))[0], lse.squeeze(-1)))
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, 1), torch.cat(lse, 1)

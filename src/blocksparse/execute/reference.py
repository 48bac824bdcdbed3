"""The executor that defines the result of all others, in plain torch."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.per_head import over_blocks
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.order.permutation import Permutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


@final
@frozen(cache_hash=True)
class ReferenceExecutor(Executor[Permutation, BlockMask]):
    """Softmax attention over exactly the kept pairs, for any permutation, dtype and device, without kernels.

    It computes one row of blocks at a time and gathers only the keys that the row keeps. So it takes memory for
    the kept blocks of one row. It computes in fp32 or better, on a GPU in float64. Every other executor is tested
    against its result for float64 inputs.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out)
        grid, keep = mask.grid, mask.per_query_head()
        B, Hq, M, _ = q.shape
        # On a GPU plain torch may round fp32 to TF32, if the process allows that.
        dtype = torch.float64 if q.is_cuda else wide_dtype(q)
        result = q.new_zeros((B, Hq, M, v.shape[-1]), dtype=v.dtype)
        sink = over_blocks(float("-inf") if spec.sinks is None else spec.sinks, keep).to(dtype)
        lse = sink.squeeze(-1).to(wide_dtype(q)).expand(B, Hq, M).clone()
        head = torch.arange(Hq, device=q.device)[:, None] // (Hq // k.shape[1])
        batch = torch.arange(B, device=q.device)[:, None, None]

        for row in range(grid.rows):
            query = mask.queries(row)  # [B, Hq, m]
            rows = q.gather(2, query.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])).to(dtype)

            count = int(keep[:, :, row].sum(-1).max())
            if count == 0:
                continue
            kept, column = keep[:, :, row].sort(dim=-1, descending=True, stable=True)
            kept, column = kept[..., :count], column[..., :count]  # [B, Hq, count]
            index = column.unsqueeze(-1).expand(-1, -1, -1, grid.k_block)
            slots = mask.slots(row).gather(2, index)
            slots = slots.masked_fill(~kept.unsqueeze(-1), -1).flatten(-2)  # [B, Hq, count * k_block]

            allowed = grid.is_visible((query + grid.first_position).unsqueeze(-1), slots.unsqueeze(-2))
            token = slots.clamp_min(0).long()
            logits = spec.capped(products(rows, k[batch, head, token].to(dtype)) * spec.scale)
            logits = logits.masked_fill(~allowed, float("-inf"))
            peak = logits.amax(-1, keepdim=True).maximum(sink)
            origin = peak.masked_fill(peak == float("-inf"), 0.0)
            weight = (logits - origin).exp()
            total = weight.sum(-1, keepdim=True) + (sink - origin).exp()
            # An empty slot reads token 0 with a weight of 0. If that value is infinite, 0 * inf would be NaN.
            values = v[batch, head, token].to(dtype).masked_fill(slots.unsqueeze(-1) < 0, 0.0)
            block = products(weight / total.masked_fill(total == 0, 1.0), values.mT)
            block = block.masked_fill(~allowed.any(-1, keepdim=True), 0.0)  # the same of a query without keys
            result.scatter_(2, query.unsqueeze(-1).expand(block.shape), block.to(result.dtype))
            lse.scatter_(2, query, (total.log() + peak).squeeze(-1).to(lse.dtype))
        return AttentionOutput(result, lse).written_to(out)

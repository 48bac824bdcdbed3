"""The plan handed to PyTorch's compiled FlexAttention: the default on a CPU."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(eq=False)
class FlexExecutor(Executor[GlobalPermutation, BlockMask]):
    """Compiled FlexAttention over the block lists: fast on a CPU with a C++ compiler, and on a GPU.

    The first call of a kind compiles, for seconds. On a CPU FlexAttention gives no lse, so `lse` is None.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        reasons = []
        if q.device.type == "cpu" and compiler() is None:
            reasons.append("FlexAttention must be compiled, and no C++ compiler is found (c++, g++ or clang++)")
        if q.device.type not in ("cpu", "cuda"):
            reasons.append(f"FlexAttention is compiled for CPUs and GPUs, not for {q.device.type}")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"FlexAttention takes float16, bfloat16 and float32, not {q.dtype}")
        return reasons

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: GlobalPermutation, mask: BlockMask, *, scale: float
    ) -> AttentionOutput:
        self.refuse_unsupported(q, k, v, mask, hint="Use ReferenceExecutor(), which needs no compiler.")
        lead = mask.grid.q_lead
        queries = pad(permutation.gather_queries(q), (0, 0, lead, 0))
        keys, values = permutation.gather_keys(k), permutation.gather_keys(v)
        block_mask = to_flex(mask, q_len=queries.shape[2], k_len=keys.shape[2])
        aux = None if q.device.type == "cpu" else flex.AuxRequest(lse=True)
        gqa = queries.shape[1] != keys.shape[1]
        result = _compiled()(
            queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=gqa, return_aux=aux
        )
        out, lse = (result, None) if aux is None else (result[0], result[1].lse)
        out = permutation.restore(out[:, :, lead:])
        return AttentionOutput(out, None if lse is None else permutation.restore(lse[:, :, lead:]))


def to_flex(mask: BlockMask, *, q_len: int, k_len: int) -> flex.BlockMask:
    """FlexAttention's `BlockMask` of `mask`; queries are padded in front by `grid.q_lead`.

    Uncompiled FlexAttention ignores block lists and looks only at `mask_mod`, so `mask_mod` says it all:
    the block is kept, and the key stands at or before the query.
    """
    grid, plan = mask.grid, BlockPlan.of(mask)
    keep = mask.per_query_head()
    B, Hq = keep.shape[:2]
    q_position = grid.q_position.expand(B, Hq, -1)
    k_position = grid.k_position[:, :, 0]
    k_position = k_position.repeat_interleave(Hq // k_position.shape[1], dim=1).expand(B, Hq, -1)
    q_block, k_block, causal = grid.q_block, grid.k_block, grid.causal

    def allowed(b: Tensor, h: Tensor, q_place: Tensor, k_slot: Tensor) -> Tensor:
        k_at = k_position[b, h, k_slot]
        kept = keep[b, h, q_place // q_block, k_slot // k_block] & (k_at >= 0)
        return kept & (k_at <= q_position[b, h, q_place]) if causal else kept

    per_head = Hq // plan.full_count.shape[1]
    lists = (plan.partial_count, plan.partial_index, plan.full_count, plan.full_index)
    partial_count, partial_index, full_count, full_index = (x.repeat_interleave(per_head, dim=1) for x in lists)
    return flex.BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=(q_block, k_block),
        mask_mod=allowed,
        seq_lengths=(q_len, k_len),
        compute_q_blocks=False,
    )


@functools.cache
def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on a CPU, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention, dynamic=True)

"""Block-sparse attention by the kernels of flash-attn-4 (extra `fa4`)."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.attention_spec import AttentionSpec
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.executors.importable import not_importable
from blocksparse.executors.one_order import one_order, refuse_several_orders
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.runtime.repetition import refuse_repetition
from blocksparse.selectors.block_mask import BlockMask

_NOWHERE = torch.iinfo(torch.int32).max  # a position after every query


@final
@frozen(cache_hash=True)
class FlashAttention4Executor(Executor[GlobalPermutation, BlockMask]):
    """flash-attn-4's forward kernel over the kept blocks: fp16 and bf16, on NVIDIA GPUs from Hopper on.

    The result is exact up to rounding. Keys and values are gathered once per KV head, as in `TritonExecutor`. The
    first call with a new combination of sizes and options compiles for some seconds. The interface of flash-attn-4
    is in beta; this is written for 4.0.0b36.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported(q, k, v, mask, spec)
        # The package `flash_attn` alone may be its predecessor.
        reasons += not_importable("flash_attn.cute", "flash-attn-4", "fa4")
        if q.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"the kernel takes float16 and bfloat16, not {q.dtype}")
        if not q.is_cuda or torch.version.hip is not None:
            reasons.append(f"the kernel is for NVIDIA GPUs, and these tensors are on {q.device.type}")
            return reasons
        major, minor = torch.cuda.get_device_capability(q.device)
        if major not in (9, 10, 11):
            reasons.append(f"the kernel needs compute capability 9, 10 or 11, not {major}.{minor}")
        return reasons + _wrong_sizes(q.shape[-1], v.shape[-1], mask, hopper=major == 9)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint="Use AutoExecutor(), or TritonExecutor().")
        permutation = one_order(mask)
        refuse_repetition("FlashAttention-4 runs")
        from flash_attn.cute import flash_attn_func

        lead = mask.grid.q_lead
        queries = pad(permutation.gather_queries(q), (0, 0, lead, 0)) if lead else permutation.gather_queries(q)
        keys, values = permutation.gather_keys_and_values(k, v)
        with torch.cuda.device(q.device):
            result, lse = flash_attn_func(
                queries.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                softmax_scale=spec.scale,
                return_lse=True,
                block_sparse_tensors=to_flash_attention_4(mask),
                **_positions(mask),
            )[:2]
        result, lse = result.transpose(1, 2)[:, :, lead:], lse[:, :, lead:]
        return AttentionOutput(permutation.restore(result), permutation.restore(lse)).written_to(out)


def to_flash_attention_4(mask: BlockMask) -> Any:
    """The mask as flash-attn-4's `BlockSparseTensorsTorch`, with one list per query head.

    Raises:
        ValueError: the mask has a sliding window, which block lists do not say; or its rows read keys in orders of
            their own.
    """
    refuse_several_orders(mask, "flash-attn-4")
    if mask.grid.window is not None:
        raise ValueError(
            f"flash-attn-4 supports block lists and causality, and this mask has a sliding window of "
            f"{mask.grid.window} tokens: run it with TritonExecutor()"
        )
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    plan = BlockPlan.of(mask)
    lists = (plan.partial_count, plan.partial_index, plan.full_count, plan.full_index)
    per_head = mask.grid.q_heads // plan.index.shape[1]
    return BlockSparseTensorsTorch(
        *(x.repeat_interleave(per_head, dim=1) if per_head > 1 else x for x in lists),
        block_size=(plan.q_block, plan.k_block),
    )


def _positions(mask: BlockMask) -> dict[str, Any]:
    """The arguments by which the kernel masks pairs in partial blocks. It masks none in full blocks."""
    from blocksparse.kernels.positions.flash_attention_4_mask import causal, key_not_after_query

    grid = mask.grid
    if grid.permutation.k_index is None and grid.permutation.q_index is None:
        return {"mask_mod": causal} if grid.causal else {}
    shape = mask.keep.shape[0], grid.q_heads
    q_at, k_at = grid.q_position, grid.k_position[:, :, 0]
    k_at = k_at.masked_fill(k_at < 0, _NOWHERE)
    if not grid.causal:
        q_at = torch.full_like(q_at, _NOWHERE - 1)
    aux = [x.repeat_interleave(shape[1] // x.shape[1], 1).expand(*shape, -1).contiguous() for x in (q_at, k_at)]
    return {"mask_mod": key_not_after_query, "aux_tensors": aux}


def _wrong_sizes(head_dim: int, value_dim: int, mask: BlockMask, *, hopper: bool) -> list[str]:
    """The reasons why the kernel has no tiles for these head dims and blocks; empty if it has."""
    reasons = []
    largest, q_block, k_block = max(head_dim, value_dim), mask.grid.q_block, mask.grid.k_block
    limit = 256 if hopper else 128
    if largest > limit or head_dim % 8 or value_dim % 8:
        reasons.append(f"head dims must be multiples of 8 up to {limit}, not {head_dim} and {value_dim}")
    if hopper:
        longest = 128 if largest <= 128 else 80
        if q_block % 64 or k_block % 16 or k_block > longest:
            reasons.append(
                f"blocks must be multiples of 64 queries by 16 to {longest} keys, not {q_block} x {k_block}"
            )
    elif q_block % 256 or k_block % 128:
        reasons.append(f"blocks must be multiples of 256 queries by 128 keys, not {q_block} x {k_block}")
    return reasons

"""Block-sparse attention by cuDNN's kernels (extra `cudnn`)."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.executors.importable import not_importable
from blocksparse.executors.one_order import one_order
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.runtime.repetition import refuse_repetition
from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(cache_hash=True)
class CudnnExecutor(Executor[GlobalPermutation, BlockMask]):
    """cuDNN's block-sparse forward kernels over the kept blocks: calls that are not causal, in whole blocks.

    Exact up to rounding: fp16 and bf16, on NVIDIA GPUs of compute capability 9 to 12, in blocks of 64 or 128. Keys
    and values are gathered once per KV head, as in `TritonExecutor`. The first call of a kind compiles for some
    seconds. It is written for nvidia-cudnn-frontend 1.32, whose interface is experimental. Tests call it with a
    stand-in for the kernel.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported(q, k, v, mask, spec)
        reasons += not_importable("cudnn.block_sparse_attention", "cuDNN's frontend with block sparsity", "cudnn")
        if mask.grid.causal:
            reasons.append("the kernel knows no causality; call with causal=False")
        if q.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"the kernel takes float16 and bfloat16, not {q.dtype}")
        reasons += _wrong_blocks(mask)
        if not q.is_cuda or torch.version.hip is not None:
            reasons.append(f"the kernel is for NVIDIA GPUs, and these tensors are on {q.device.type}")
            return reasons
        major, minor = torch.cuda.get_device_capability(q.device)
        if not 9 <= major <= 12:
            reasons.append(f"the kernel needs compute capability 9 to 12, not {major}.{minor}")
        return reasons + _wrong_heads(q, k, v, mask.grid.q_block, major)

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
        refuse_repetition("cuDNN runs")
        with torch.cuda.device(q.device):
            return attend_by_cudnn(q, k, v, mask, spec.scale).written_to(out)


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> AttentionOutput:
    """Call the kernel; a row without blocks gives `out` 0 and `lse` -inf."""
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    order, (index, count) = one_order(mask), to_cudnn(mask)
    keys, values = order.gather_keys_and_values(k, v)
    found = block_sparse_attention_forward(
        order.gather_queries(q),
        keys,
        values,
        index,
        q2k_block_nums=count,
        sparse_block_size=mask.grid.q_block,
        allow_empty_block_nums=True,
        softmax_scale=scale,
        pack_gqa=False,
    )
    return AttentionOutput(order.restore(found["o_tensor"]), order.restore(found["lse_tensor"]))


def to_cudnn(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The mask as cuDNN takes it: key blocks `[B, Hq, rows, cols]` int32, and how many of them `[B, Hq, rows]`."""
    plan = BlockPlan.of(mask)
    per_head = mask.grid.q_heads // plan.index.shape[1]
    index, count = plan.full_index, plan.full_count
    if per_head > 1:
        index, count = (x.repeat_interleave(per_head, dim=1) for x in (index, count))
    return index.contiguous(), count.contiguous()


def _wrong_blocks(mask: BlockMask) -> list[str]:
    """The reasons why the kernel has no blocks like these, as sizes say."""
    grid, reasons = mask.grid, []
    if grid.q_block != grid.k_block or grid.q_block not in (64, 128):
        reasons.append(f"blocks must be 64 x 64 or 128 x 128, not {grid.q_block} x {grid.k_block}")
    if grid.q_len % grid.q_block or grid.k_len % grid.k_block or grid.slots != grid.k_len:
        reasons.append(
            f"queries and keys must fill whole blocks of {grid.q_block} and {grid.k_block}"
            + ("" if grid.slots == grid.k_len else ", with one slot for each key")
        )
    return reasons


def _wrong_heads(q: Tensor, k: Tensor, v: Tensor, block: int, major: int) -> list[str]:
    """The reasons why the kernels of this compute capability have no heads like these."""
    dims, known = (q.shape[-1], v.shape[-1]), (64, 96, 128)
    if major == 9:
        return (
            []
            if all(x in known for x in dims)
            else [f"head dims must be 64, 96 or 128, not {dims[0]} and {dims[1]}"]
        )
    if major == 12 or block == 64:
        reasons = [] if dims == (128, 128) else [f"head dims must be 128, not {dims[0]} and {dims[1]}"]
        if major != 12 and q.dtype != torch.bfloat16:
            reasons.append(f"blocks of 64 need bfloat16 there, not {q.dtype}")
        if major != 12 and q.shape[1] != k.shape[1]:
            reasons.append(
                f"blocks of 64 need as many KV heads as query heads there, not {k.shape[1]} for {q.shape[1]}"
            )
        return reasons
    if dims[0] == dims[1] and dims[0] in known:
        return []
    return [f"head dims must be equal, and 64, 96 or 128, not {dims[0]} and {dims[1]}"]

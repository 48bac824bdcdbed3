"""Block-sparse attention by the kernels of other packages: cuDNN's and flash-attn-4's."""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.execute.executor import AttentionOutput, Executor, one_order, refuse_several_orders
from blocksparse.execute.launched import BlockPlan
from blocksparse.launch.launch_graph import refuse_capture
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


def not_importable(module: str, title: str, extra: str) -> list[str]:
    """The reason why `module`, of what is called `title`, cannot be imported; empty if it can.

    It is imported for that: a found package may lack what it needs itself.
    """
    install = f"pip install -e '.[{extra}]' in a checkout"
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return [f"{title} is not installed ({install})"]
        return [f"{title} cannot be imported ({error}; {install})"]
    except Exception as error:  # a library that is not found, or a version that does not fit
        return [f"{title} cannot be imported ({type(error).__name__}: {error}; {install})"]
    return []


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
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint="Use AutoExecutor(), or TritonExecutor().")
        refuse_capture("cuDNN runs")
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
    if major == 9 and not all(x in known for x in dims):
        return [f"head dims must be 64, 96 or 128, not {dims[0]} and {dims[1]}"]
    if major == 12 or (block == 64 and major != 9):
        reasons = [] if dims == (128, 128) else [f"head dims must be 128, not {dims[0]} and {dims[1]}"]
        if major != 12 and q.dtype != torch.bfloat16:
            reasons.append(f"blocks of 64 need bfloat16 there, not {q.dtype}")
        if major != 12 and q.shape[1] != k.shape[1]:
            reasons.append(
                f"blocks of 64 need as many KV heads as query heads there, not {k.shape[1]} for {q.shape[1]}"
            )
        return reasons
    if major == 9 or (dims[0] == dims[1] and dims[0] in known):
        return []
    return [f"head dims must be equal, and 64, 96 or 128, not {dims[0]} and {dims[1]}"]


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
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint="Use AutoExecutor(), or TritonExecutor().")
        permutation = one_order(mask)
        refuse_capture("FlashAttention-4 runs")
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
        ValueError: the mask has a sliding window, which block lists cannot express, or its rows read keys in
            different orders.
    """
    refuse_several_orders(mask, "flash-attn-4")
    if mask.grid.window is not None:
        raise ValueError(
            f"flash-attn-4 supports block lists and causality, and this mask has a sliding window of "
            f"{mask.grid.window} tokens. Run it with TritonExecutor()."
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
    from blocksparse.kernels.attention.flash_attention_4_mask import causal, key_not_after_query

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
    """Reasons why the kernel has no tiles for these head dims and blocks."""
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

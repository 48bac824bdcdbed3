"""Block lists on a GPU, any vendor that Triton compiles for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask

if TYPE_CHECKING:
    from blocksparse.kernels.sparse_attention import TileConfig


@final
@frozen(eq=False)
class TritonExecutor(Executor[GlobalPermutation, BlockMask]):
    """Gather keys and values once per KV head, then walk each row's kept blocks in one Triton kernel.

    fp16, bf16 and fp32; head dims up to 256 (padded to a power of two on chip); native GQA; `Nq <= Nk`.
    Runs compiled on a GPU, and on CPU tensors under Triton's interpreter (fp16 and fp32).

    Args:
        config: tiles, warps and stages of the kernel; by default the largest tiles the blocks allow.
    """

    config: TileConfig | None = None

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        if find_spec("triton") is None:
            return ["triton is not installed"]
        from blocksparse.kernels.sparse_attention import runs_interpreted

        reasons = []
        if not q.is_cuda and not runs_interpreted():
            reasons.append(f"Triton compiles for GPUs, and these tensors are on {q.device.type}")
        if runs_interpreted() and q.dtype == torch.bfloat16:
            reasons.append("Triton's interpreter computes bfloat16 wrongly")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"the kernel takes float16, bfloat16 and float32, not {q.dtype}")
        grid = mask.grid
        if grid.q_block % 16 or grid.k_block % 16:
            reasons.append(f"blocks must be multiples of 16, not {grid.q_block} x {grid.k_block}")
        elif self.config is not None and not self.config.fits(grid.q_block, grid.k_block):
            reasons.append(f"{self.config} does not divide blocks of {grid.q_block} x {grid.k_block}")
        return reasons

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        permutation: GlobalPermutation,
        mask: BlockMask,
        *,
        scale: float,
    ) -> AttentionOutput:
        self.refuse_unsupported(
            q, k, v, mask, hint="Use AutoExecutor(), or FlexExecutor() or ReferenceExecutor() on a CPU."
        )
        from blocksparse.kernels.sparse_attention import can_use_tma, default_config, sparse_attention

        grid, plan = mask.grid, BlockPlan.of(mask)
        head_dim = max(q.shape[-1], v.shape[-1])
        config = self.config or default_config(grid.q_block, grid.k_block, head_dim, q.element_size())
        keys, values = permutation.gather_keys(k), permutation.gather_keys(v)
        out, lse = sparse_attention(
            permutation.gather_queries(q),
            keys,
            values,
            plan.partial_count,
            plan.partial_index,
            plan.full_count,
            plan.full_index,
            grid.q_position,
            grid.k_position[:, :, 0],
            grid.q_block,
            grid.k_block,
            grid.q_lead,
            grid.causal,
            scale,
            config.block_m,
            config.block_n,
            config.num_warps,
            config.num_stages,
            config.tma and can_use_tma(keys, values),
        )
        return AttentionOutput(permutation.restore(out), permutation.restore(lse))

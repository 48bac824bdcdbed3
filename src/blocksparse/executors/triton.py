"""Block lists on a GPU, any vendor that Triton compiles for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, final

import torch
from attrs import field, frozen
from attrs.validators import instance_of, optional
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.executors.int8_qk import Int8QK
from blocksparse.kernels.quantize import fp8_per_token
from blocksparse.per_head import PerHead, check, optional_per_head
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

    The options after `config` approximate, and are off by default (docs/numerics.md has their bounds).

    Args:
        config: tiles, warps and stages of the kernel; by default the largest tiles the blocks allow.
        pv_skip: lambda of SpargeAttn 3.4, negative, a difference of logits; one for all query heads or one for
            each. In blocks without a masked pair, a query leaves out the tiles of keys whose best logit is more
            than `-pv_skip` below the best one met before. With `m` keys left out, at most a share
            `m e^pv_skip` of the query's mass is lost.
        int8_qk: logits from int8 queries and keys.
        fp8_pv: fp8 (e4m3) weights and values, one scale for each token; added in fp32. NVIDIA GPUs from Ada on.

    Raises:
        ValueError: `pv_skip` is not negative.
    """

    config: TileConfig | None = None
    pv_skip: PerHead | None = field(
        default=None,
        kw_only=True,
        converter=optional_per_head,
        validator=optional(check("negative", lambda x: x < 0)),
    )
    int8_qk: Int8QK | None = field(default=None, kw_only=True, validator=optional(instance_of(Int8QK)))
    fp8_pv: bool = field(default=False, kw_only=True, validator=instance_of(bool))

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
        if self.fp8_pv:
            reasons += self._without_fp8(q, grid.k_block)
        if isinstance(self.pv_skip, Tensor) and self.pv_skip.ndim and len(self.pv_skip) != grid.q_heads:
            reasons.append(f"'pv_skip' has {len(self.pv_skip)} entries for {grid.q_heads} query heads")
        return reasons

    def _without_fp8(self, q: Tensor, k_block: int) -> list[str]:
        """Why weights and values cannot be fp8."""
        from blocksparse.kernels.sparse_attention import runs_interpreted

        reasons = []
        if runs_interpreted():
            reasons.append("Triton's interpreter rounds to fp8 wrongly")
        elif torch.version.hip is not None:
            reasons.append("fp8 products are for NVIDIA GPUs")
        elif q.is_cuda and (capability := torch.cuda.get_device_capability(q.device)) < (8, 9):
            reasons.append(
                f"fp8 products need compute capability 8.9 or later, not {capability[0]}.{capability[1]}"
            )
        tile = k_block & -k_block if self.config is None else self.config.block_n
        if tile < 32:
            reasons.append(f"fp8 products need tiles of at least 32 keys, not {tile}")
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
        queries = permutation.gather_queries(q)
        keys, values = permutation.gather_keys(k), permutation.gather_keys(v)
        q_scale = k_scale = k_copy = v_scale = taken = None
        if self.int8_qk is not None:
            queries, keys, q_scale, k_scale, k_copy, taken = self.int8_qk.operands(queries, keys, k, grid, scale)
        if self.fp8_pv:
            values, v_scale = fp8_per_token(values)
        out, lse = sparse_attention(
            queries,
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
            _by_head(self.pv_skip, q),
            q_scale,
            k_scale,
            k_copy,
            v_scale,
            out_dtype=v.dtype,
        )
        if taken is not None:
            lse = lse + taken
        return AttentionOutput(permutation.restore(out), permutation.restore(lse))


def _by_head(value: PerHead | None, q: Tensor) -> Tensor | None:
    """`[Hq]` fp32 on the device of `q` `[B, Hq, M, D]`."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.full((q.shape[1],), value, dtype=torch.float32, device=q.device)
    return value.to(q.device, torch.float32).expand(q.shape[1]).contiguous()

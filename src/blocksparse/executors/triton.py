"""Block-sparse attention by Triton kernels, on GPUs of any vendor that Triton compiles for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import final

import torch
from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.executors.int8_qk import Int8QK
from blocksparse.executors.tiles import HopperTiles, Tiles, TritonTiles, tuned
from blocksparse.kernels.attention.sparse_attention import sparse_attention
from blocksparse.kernels.rounding.fp8_values import fp8_values
from blocksparse.per_head import PerHead, by_head, negative, per_head, wrong_heads
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.validators import a, flag, optional


@final
@frozen(eq=False)
class TritonExecutor(Executor[GlobalPermutation, BlockMask]):
    """Gather keys and values once per KV head, then attend to the kept blocks of each row in one kernel.

    It takes fp16, bf16 and fp32, head dims up to 256 (padded to a power of two on chip) and grouped query heads
    without copies of keys. It runs compiled on a GPU, and on CPU tensors under Triton's interpreter (fp16 and
    fp32). On GPUs of compute capability 9.0 (Hopper), half precision with head dims up to 128 has its own kernel.

    The options after `tiles` approximate, and are off by default (docs/numerics.md has their bounds).

    Args:
        tiles: which kernel runs and how it is launched, `HopperTiles` or `TritonTiles`; by default the fastest.
        pv_skip: lambda of SpargeAttn 3.4, negative, a difference of logits; one for all query heads or one for
            each. In blocks without a masked pair, a query leaves out each tile of keys whose greatest logit is
            more than `-pv_skip` below the greatest one that it met before. If `m` keys are left out, at most the
            share `m e^pv_skip` of the query's mass is lost.
        int8_qk: compute logits from int8 queries and keys.
        fp8_pv: round weights and values to fp8 (e4m3), with one scale for each token, and add products in fp32.
            It needs an NVIDIA GPU from Ada on.

    Raises:
        ValueError: `pv_skip` is not negative.
    """

    tiles: Tiles | None = field(default=None, validator=optional(a(HopperTiles, TritonTiles)))
    pv_skip: PerHead | None = field(
        default=None, kw_only=True, converter=converters.optional(per_head), validator=optional(negative)
    )
    int8_qk: Int8QK | None = field(default=None, kw_only=True, validator=optional(a(Int8QK)))
    fp8_pv: bool = field(default=False, kw_only=True, validator=flag)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        if find_spec("triton") is None:
            return ["triton is not installed"]
        from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted

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
        elif self.tiles is not None:
            reasons += self.tiles.unsupported(q, k, v, grid.q_block, grid.k_block)
        if isinstance(self.tiles, HopperTiles) and self._approximates:
            reasons.append(
                f"{self.tiles} cannot be combined with 'pv_skip', 'int8_qk' or 'fp8_pv', but TritonTiles can"
            )
        if self.fp8_pv:
            reasons += self._without_fp8(q, grid.k_block)
        return reasons + wrong_heads("pv_skip", self.pv_skip, grid.q_heads)

    @property
    def _approximates(self) -> bool:
        return self.pv_skip is not None or self.int8_qk is not None or self.fp8_pv

    def _without_fp8(self, q: Tensor, k_block: int) -> list[str]:
        """The reasons why weights and values cannot be fp8; empty if they can."""
        from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted

        reasons = []
        if runs_interpreted():
            reasons.append("Triton's interpreter rounds to fp8 wrongly")
        elif torch.version.hip is not None:
            reasons.append("fp8 products are for NVIDIA GPUs")
        elif q.is_cuda and (capability := torch.cuda.get_device_capability(q.device)) < (8, 9):
            reasons.append(
                f"fp8 products need compute capability 8.9 or later, not {capability[0]}.{capability[1]}"
            )
        tile = k_block & -k_block if self.tiles is None else self.tiles.block_n
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
        hint = "Use AutoExecutor(), or CpuExecutor() on a CPU."
        self.check(q, k, v, permutation, mask, hint=hint)
        grid, plan = mask.grid, BlockPlan.of(mask)
        # The op of the exact kernels moves keys and values into slots itself. For approximate kernels they are
        # moved here, by the function that rounds them if they are rounded.
        exact, key_slots = not self._approximates, permutation.key_slots
        q_scale = k_scale = k_copy = v_scale = taken = None
        if self.int8_qk is not None:
            queries, keys, q_scale, k_scale, k_copy, taken = self.int8_qk.operands(q, k, permutation, grid, scale)
        else:
            queries, keys = permutation.gather_queries(q), k if exact else permutation.gather_keys(k)
        if self.fp8_pv:
            values, v_scale = fp8_values(v, key_slots)
        else:
            values = v if exact else permutation.gather_keys(v)
        tiles = self.tiles or tuned(queries, keys, values, grid.q_block, grid.k_block, exact=exact)
        out, lse = sparse_attention(
            queries,
            keys,
            values,
            plan.full_count,
            plan.partial_count,
            plan.index,
            grid.q_position,
            grid.k_position[:, :, 0],
            grid.q_block,
            grid.k_block,
            grid.q_lead,
            grid.causal,
            scale,
            tiles.kernel,
            tiles.sizes,
            permutation.q_index is None,
            permutation.k_index is None,
            by_head(self.pv_skip, q),
            q_scale,
            k_scale,
            k_copy,
            v_scale,
            k_slots=key_slots if exact else None,
            out_dtype=v.dtype,
        )
        if taken is not None:
            lse = lse + taken
        return AttentionOutput(permutation.restore(out), permutation.restore(lse))

"""Block-sparse attention in 8 bits on Hopper: int8 queries and keys, and fp8 weights and values."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple, final

from attrs import converters, field, frozen
from torch import Tensor

from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.executors.executor import Executor
from blocksparse.executors.tiles import HALF, HopperTiles, tuned_int8
from blocksparse.geometry import Grid
from blocksparse.kernels.attention.int8_attention import int8_attention
from blocksparse.kernels.common.hardware import is_hopper
from blocksparse.kernels.rounding.quantize import SMOOTHED_BY, smoothing_mean
from blocksparse.kernels.rounding.tile_operands import fp8_value_tiles, int8_key_tiles, int8_query_tiles
from blocksparse.per_head import PerHead, by_head, negative, per_head, wrong_heads
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask
from blocksparse.validators import a, flag, optional


class TileOperands(NamedTuple):
    """The tensors that the kernel reads. `kernels/rounding/tile_operands.py` defines their scales."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, 2 * Hk, N, D] int8
    v: Tensor  # [B, 2 * Hk, D, N up to a multiple of 16] fp8, or [B, Hk, N, D]
    q_scale: Tensor  # [B, Hq, M] fp32
    k_tile_scale: Tensor  # [B, Hk, tiles, 4] fp32
    k_token_scale: Tensor  # [B, Hk, N] fp32
    v_tile_log2: Tensor | None  # [B, Hk, tiles, 4] fp32
    v_token: Tensor | None  # [B, 2 * Hk, N] fp32, log2 of scales, then their inverses
    taken: Tensor | None  # [B, Hq, M] fp32, what smoothing subtracted from every logit of a query


@final
@frozen(eq=False)
class Int8Executor(Executor[GlobalPermutation, BlockMask]):
    """Round tokens to 8 bits while they move into slots, then attend to each row's kept blocks in one kernel.

    This is SageAttention's arithmetic (SpargeAttn 3.5) in a kernel for GPUs of compute capability 9.0 (Hopper),
    for fp16 and bf16 and head dims 64 and 128. Queries and keys are rotated by a Hadamard matrix first, which does
    not change their products and makes their entries more even. Each query has one scale. In blocks without a
    masked pair, each tile of keys has four scales, one for each group of columns that a thread of a matrix product
    holds. In blocks with masked pairs, each key has its own scale, so that no bit of a row depends on later
    tokens. docs/numerics.md has the errors.

    Args:
        fp8_pv: round weights and values to fp8 (e4m3), with sums that are moved to fp32 after four tiles at most.
            `False` leaves both in the precision of the input.
        smooth_k: subtract the mean key from all keys first. Softmax ignores this, and `lse` is corrected. When
            causal, the mean is that of the first tokens, as many as a key block has, but at most 128.
        pv_skip: lambda of SpargeAttn 3.4, negative, a difference of logits, as in `TritonExecutor`.
        tiles: how the kernel is launched; by default the fastest.

    Raises:
        ValueError: `pv_skip` is not negative.
    """

    fp8_pv: bool = field(default=True, validator=flag)
    smooth_k: bool = field(default=True, kw_only=True, validator=flag)
    pv_skip: PerHead | None = field(
        default=None, kw_only=True, converter=converters.optional(per_head), validator=optional(negative)
    )
    tiles: HopperTiles | None = field(default=None, kw_only=True, validator=optional(a(HopperTiles)))

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> list[str]:
        if find_spec("triton") is None:
            return ["triton is not installed"]
        reasons, grid = [], mask.grid
        if not is_hopper(q.device):
            reasons.append("the kernel needs a GPU of compute capability 9.0 (Hopper)")
        if q.dtype not in HALF:
            reasons.append(f"the kernel takes float16 and bfloat16, not {q.dtype}")
        if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
            reasons.append(f"head dims must be 64 or 128, and equal, not {q.shape[-1]} and {v.shape[-1]}")
        tiles = self._tiles(q, grid)
        if grid.q_block % 64 or grid.k_block % 64:
            reasons.append(f"blocks must be multiples of 64, not {grid.q_block} x {grid.k_block}")
        elif grid.q_block % (64 * tiles.consumers) or max(grid.k_block, tiles.block_n) % self._piece(q, grid):
            reasons.append(f"{tiles} does not divide blocks of {grid.q_block} x {grid.k_block}")
        reasons += tiles.too_large(q.shape[-1], v.shape[-1], qk_bytes=1, pv_bytes=1 if self.fp8_pv else 2)
        reasons += tiles.too_many(q, grid.q_block, grid.cols)
        return reasons + wrong_heads("pv_skip", self.pv_skip, grid.q_heads)

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
        self.check(q, k, v, permutation, mask, hint="Use TritonExecutor() or AutoExecutor().")
        grid, plan = mask.grid, BlockPlan.of(mask)
        rounded = self.operands(q, k, v, permutation, grid, scale)
        out, lse = int8_attention(
            rounded.q,
            rounded.k,
            rounded.v,
            plan.full_count,
            plan.partial_count,
            plan.index,
            grid.q_position,
            grid.k_position[:, :, 0],
            rounded.q_scale,
            rounded.k_tile_scale,
            rounded.k_token_scale,
            rounded.v_tile_log2,
            rounded.v_token,
            rounded.taken,
            by_head(self.pv_skip, q),
            grid.q_block,
            grid.k_block,
            grid.q_lead,
            grid.causal,
            scale,
            self._tiles(q, grid).sizes,
            permutation.q_index is None,
            permutation.k_index is None,
            v.dtype,
        )
        return AttentionOutput(permutation.restore(out), permutation.restore(lse))

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, permutation: GlobalPermutation, grid: Grid, scale: float
    ) -> TileOperands:
        """Round `q` `[B, Hq, M, D]`, `k` and `v` `[B, Hkv, N, D]` on their way into slots."""
        tile, mean, early = self._piece(q, grid), None, 0
        if self.smooth_k:
            # A row that sees a whole block sees at least as many tokens as that, and so all of the first ones.
            first = min(SMOOTHED_BY, grid.k_block)
            mean = smoothing_mean(k, grid.causal, first).squeeze(2)
            early = max(first - 1 - (grid.k_len - grid.q_len), 0) if grid.causal else 0
        queries, q_scale, taken = int8_query_tiles(q, permutation.q_index, mean=mean, scale=scale, early=early)
        keys, k_tile, k_token = int8_key_tiles(k, permutation.key_slots, tile, mean=mean)
        if self.fp8_pv:
            values = fp8_value_tiles(v, permutation.key_slots, tile)
            return TileOperands(queries, keys, values[0], q_scale, k_tile, k_token, *values[1:], taken)
        halves = permutation.gather_keys(v)
        return TileOperands(queries, keys, halves, q_scale, k_tile, k_token, None, None, taken)

    def _piece(self, q: Tensor, grid: Grid) -> int:
        """How many keys share scales: those of a tile of the kernel, or those of a block if that is smaller."""
        return min(grid.k_block, self._tiles(q, grid).block_n)

    def _tiles(self, q: Tensor, grid: Grid) -> HopperTiles:
        return self.tiles or tuned_int8(q.shape[-1], grid.q_block, grid.k_block, self.fp8_pv)

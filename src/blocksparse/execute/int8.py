"""Block-sparse attention in 8 bits: int8 queries and keys, and fp8 weights and values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple, final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead, by_head, maybe_per_head, negative, wrong_heads
from blocksparse.check.validators import a, flag, one_of, optional
from blocksparse.execute.executor import AttentionOutput, Executor, one_order
from blocksparse.execute.launched import BlockPlan, OpaqueExecutor, execute_op, first_launched, never_launched
from blocksparse.execute.triton import portable_reasons
from blocksparse.grid import Grid
from blocksparse.kernels.attention.sparse_attention import int8_attention, sparse_attention
from blocksparse.kernels.common.hardware import hardware_of, is_hopper
from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.common.tiles import HALF, HopperTiles, Tiles, TritonTiles, portable, tuned_int8
from blocksparse.kernels.masks.arguments import Approximation
from blocksparse.kernels.quantize.tile_operands import (
    TileOperands,
    fp8_value_tiles,
    int8_key_tiles,
    int8_query_tiles,
)
from blocksparse.kernels.quantize.tokens import SMOOTHED_BY, fp8_values, int8_keys, int8_queries, smoothing_mean
from blocksparse.launch.torch_modes import is_transformed
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec


class TokenOperands(NamedTuple):
    """Inputs of the portable kernel: queries and keys, with one scale each."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, copies * Hk, N, D] int8
    q_scale: Tensor  # [B, Hq, M] fp32
    k_scale: Tensor  # [B, copies * Hk, N] fp32
    k_copy: Tensor | None  # [B|1, Hq|1, rows] int32, the copy of k that a row reads; None when there is one
    taken: Tensor | None  # [B, Hq, M] fp32, what smoothing subtracted from every logit of a query


def token_operands(
    q: Tensor, k: Tensor, permutation: GlobalPermutation, grid: Grid, *, scale: float, smooth_k: bool, shared: bool
) -> TokenOperands:
    """Round `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]` on their way into slots.

    Args:
        shared: whether the tokens of a block of the mask share a scale.
    """
    mean = k_copy = None
    plain_below = 0
    if smooth_k:
        mean = smoothing_mean(k, grid.causal).squeeze(2)
        if grid.causal and grid.k_len - grid.q_len < SMOOTHED_BY - 1:
            k_copy = (grid.q_first[..., 0] < SMOOTHED_BY - 1).int()
            # In original order, only keys up to here are read by rows that take keys which are not smoothed.
            in_order = permutation.q_index is None
            plain_below = min(SMOOTHED_BY - 2 + grid.q_block, grid.k_len) if in_order else grid.k_len
    queries, q_scale, taken = int8_queries(
        q, permutation.q_index, grid.q_block, grid.q_lead, shared=shared, mean=mean, scale=scale, plain=k_copy
    )
    keys, k_scale = int8_keys(
        k, permutation.key_slots, grid.k_block, shared=shared, mean=mean, plain_below=plain_below
    )
    return TokenOperands(queries, keys, q_scale, k_scale, k_copy, taken)


def tile_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    permutation: GlobalPermutation,
    grid: Grid,
    piece: int,
    *,
    scale: float,
    smooth_k: bool,
    fp8: bool,
) -> TileOperands:
    """Round `q` `[B, Hq, M, D]`, `k` and `v` `[B, Hkv, N, D]` for the kernel for Hopper.

    Args:
        piece: how many keys share scales: those of a tile of keys, or those of a block if that is smaller.
        fp8: whether values are rounded, too.
    """
    mean, early = None, 0
    if smooth_k:
        # A row that sees a whole block sees at least as many tokens as that, and so all of the first ones.
        first = min(SMOOTHED_BY, grid.k_block)
        mean = smoothing_mean(k, grid.causal, first).squeeze(2)
        early = max(first - 1 - (grid.k_len - grid.q_len), 0) if grid.causal else 0
    queries, q_scale, taken = int8_query_tiles(q, permutation.q_index, mean=mean, scale=scale, early=early)
    keys, k_tile, k_token = int8_key_tiles(k, permutation.key_slots, piece, mean=mean)
    if fp8:
        values, tile_log2, token = fp8_value_tiles(v, permutation.key_slots, piece)
        return TileOperands(queries, keys, values, q_scale, k_tile, k_token, tile_log2, token, taken)
    halves = permutation.gather_keys(v)
    return TileOperands(queries, keys, halves, q_scale, k_tile, k_token, taken=taken)


_HINT = "Use Int8Executor(fp8_pv=False) if only fp8 is missing, or TritonExecutor() or AutoExecutor()."


@final
@frozen(cache_hash=True)
class Int8Executor(Executor[GlobalPermutation, BlockMask]):
    """Block-sparse attention with int8 queries and keys and fp8 values, in one kernel.

    This is SageAttention's arithmetic (SpargeAttn 3.5). Hopper GPUs (compute capability 9.0) have a dedicated
    kernel for fp16 and bf16, head dims 64 and 128 and blocks that are multiples of 64. There queries and keys are
    rotated by a Hadamard matrix first, which does not change their products and makes their entries more even. In
    blocks without a masked pair, each tile of keys has four scales, one for each group of columns that a thread of
    a matrix product holds. Everything else takes the portable kernel, in which each query, key and value has one
    scale. In both no bit of a row depends on later tokens. Errors: docs/reference/numerics.md.

    Args:
        fp8_pv: round weights and values to fp8 (e4m3), which needs an NVIDIA GPU from Ada on. `False` leaves both
            in the precision of the input.
        smooth_k: subtract the mean key from all keys first. Softmax ignores this, and `lse` is corrected. When
            causal, the mean is that of the first tokens, at most 128. Queries that do not see all of these read
            keys that are not smoothed.
        scales: `"token"` as above. `"block"` has one scale for the queries, and one for the keys, of each block of
            the mask, as in SageAttention and SpargeAttn. It always runs the portable kernel. Later tokens of the
            same block then change the rounding of a row, but not its keys.
        pv_skip: lambda of SpargeAttn 3.4. A negative difference of logits, as in `TritonExecutor`.
        tiles: which kernel runs and how it is launched, `HopperTiles` or `TritonTiles`. By default the fastest.

    Raises:
        ValueError: `pv_skip` is not negative, or `scales` is "block" with `HopperTiles`.
    """

    fp8_pv: bool = field(default=True, validator=flag)
    smooth_k: bool = field(default=True, kw_only=True, validator=flag)
    scales: Literal["token", "block"] = field(default="token", kw_only=True, validator=one_of("token", "block"))
    pv_skip: PerHead | None = field(
        default=None, kw_only=True, converter=maybe_per_head, validator=optional(negative)
    )
    tiles: Tiles | None = field(default=None, kw_only=True, validator=optional(a(HopperTiles, TritonTiles)))
    _opaque: OpaqueExecutor = field(
        init=False, repr=False, eq=False, default=Factory(lambda self: OpaqueExecutor(self), takes_self=True)
    )

    def __attrs_post_init__(self) -> None:
        if self.scales == "block" and isinstance(self.tiles, HopperTiles):
            raise ValueError("'scales' must be 'token' with HopperTiles: 'block'. Or give TritonTiles as 'tiles'.")

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        if find_spec("triton") is None:
            return ["triton is not installed"]
        tiles = next(self._kernels(q, k, v, mask.grid))
        if isinstance(tiles, HopperTiles):
            reasons = self._hopper_reasons(q, v, mask.grid, tiles)
        else:
            reasons = portable_reasons(q, k, v, mask, self.tiles)
            if self.fp8_pv:
                reasons += _without_fp8(q, tiles.block_n)
        reasons += wrong_heads("pv_skip", self.pv_skip, mask.grid.q_heads)
        reasons += super().unsupported(q, k, v, mask, spec)
        return reasons or never_launched(self._kernels(q, k, v, mask.grid), self._tried(q, v))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        if is_transformed():
            return execute_op(self._opaque, q, k, v, mask, spec).written_to(out)
        self.check(q, k, v, mask, spec, out, hint=_HINT)
        grid, scale, plan = mask.grid, spec.scale, BlockPlan.of(mask)
        permutation = one_order(mask)
        skip = None if self.pv_skip is None else by_head(self.pv_skip, q)

        def attend(tiles: Tiles) -> tuple[Tensor, Tensor]:
            if isinstance(tiles, HopperTiles):
                piece = min(grid.k_block, tiles.block_n)
                operands = tile_operands(
                    q, k, v, permutation, grid, piece, scale=scale, smooth_k=self.smooth_k, fp8=self.fp8_pv
                )
                return int8_attention(
                    operands, plan, grid.positions, tiles, scale=scale, pv_skip=skip, out_dtype=v.dtype
                )
            shared = self.scales == "block"
            rounded = token_operands(q, k, permutation, grid, scale=scale, smooth_k=self.smooth_k, shared=shared)
            values, v_scale = (
                fp8_values(v, permutation.key_slots) if self.fp8_pv else (permutation.gather_keys(v), None)
            )
            result, lse = sparse_attention(
                rounded.q,
                rounded.k,
                values,
                plan,
                grid.positions,
                tiles,
                scale=scale,
                approximation=Approximation(skip, rounded.q_scale, rounded.k_scale, rounded.k_copy, v_scale),
                out=empty_as(rounded.q, v.shape[-1], v.dtype),
            )
            return result, lse if rounded.taken is None else lse + rounded.taken

        result, lse = first_launched(
            self._kernels(q, k, v, grid),
            self._tried(q, v),
            attend,
            lambda: self.check(q, k, v, mask, spec, out, hint=_HINT),
        )
        return AttentionOutput(permutation.restore(result), permutation.restore(lse)).written_to(out)

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Iterator[Tiles]:
        """The tiles given, or else those of every kernel that takes these inputs, the fastest first."""
        if self.tiles is not None:
            yield self.tiles
            return
        if self.scales == "token":
            tiles = tuned_int8(q.shape[-1], grid.q_block, grid.k_block, self.fp8_pv)
            if not self._hopper_reasons(q, v, grid, tiles):
                yield tiles
        value_bytes = 1 if self.fp8_pv else v.element_size()
        head_dim, has, out_bytes = max(q.shape[-1], v.shape[-1]), hardware_of(q), v.element_size()
        yield portable(grid.q_block, grid.k_block, head_dim, 1, has, value_bytes=value_bytes, out_bytes=out_bytes)

    def _tried(self, q: Tensor, v: Tensor) -> Hashable:
        """Everything except the tiles that decides whether a kernel can be launched."""
        skips = self.pv_skip is not None
        return "8 bits", q.device, q.dtype, q.shape[-1], v.shape[-1], self.fp8_pv, self.scales, skips

    def _hopper_reasons(self, q: Tensor, v: Tensor, grid: Grid, tiles: HopperTiles) -> list[str]:
        """The reasons why the kernel for Hopper cannot run these inputs with `tiles`."""
        reasons = []
        if not is_hopper(q.device):
            reasons.append(f"{tiles} needs a GPU of compute capability 9.0 (Hopper)")
        if q.dtype not in HALF:
            reasons.append(f"{tiles} takes float16 and bfloat16, not {q.dtype}")
        if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
            reasons.append(f"{tiles} takes head dims 64 or 128, and equal, not {q.shape[-1]} and {v.shape[-1]}")
        piece = min(grid.k_block, tiles.block_n)
        if grid.q_block % 64 or grid.k_block % 64:
            reasons.append(f"{tiles} takes blocks that are multiples of 64, not {grid.q_block} x {grid.k_block}")
        elif grid.q_block % (64 * tiles.consumers) or max(grid.k_block, tiles.block_n) % piece:
            reasons.append(f"{tiles} does not divide blocks of {grid.q_block} x {grid.k_block}")
        reasons += tiles.too_large(q.shape[-1], v.shape[-1], qk_bytes=1, pv_bytes=1 if self.fp8_pv else 2)
        return reasons + tiles.too_many(q, grid.q_block, grid.cols)


def _without_fp8(q: Tensor, block_n: int) -> list[str]:
    """The reasons why the portable kernel cannot have weights and values of fp8."""
    from blocksparse.kernels.attention.sparse_attention_triton import runs_interpreted

    reasons = []
    if runs_interpreted():
        reasons.append("Triton's interpreter rounds to fp8 wrongly")
    elif torch.version.hip is not None:
        reasons.append("fp8 products are for NVIDIA GPUs")
    elif q.is_cuda and (capability := torch.cuda.get_device_capability(q.device)) < (8, 9):
        reasons.append(f"fp8 products need compute capability 8.9 or later, not {capability[0]}.{capability[1]}")
    if block_n < 32:
        reasons.append(f"fp8 products need tiles of at least 32 keys, not {block_n}")
    return reasons

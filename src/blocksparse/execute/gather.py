"""Attention that loads keys through an index map, best blocks first, and stops early (S2O, section 3.2)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from importlib.util import find_spec
from typing import final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead, at_least_0, by_head, per_head, written, wrong_heads
from blocksparse.check.validators import flag, one_of, size, whole
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.execute.launched import OpaqueExecutor, execute_op, first_launched, listed, never_launched
from blocksparse.execute.triton import without_tensor_cores
from blocksparse.grid import Grid
from blocksparse.kernels.attention.gather_attention import gather_attention, kernels_for
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.arguments import RankedLists, StopRule
from blocksparse.kernels.select.top_k import visiting_order
from blocksparse.launch.torch_modes import is_transformed
from blocksparse.order.permutation import Permutation
from blocksparse.select.block_mask import BlockMask, RankedBlockMask
from blocksparse.spec import AttentionSpec

_HINT = "Choose another preset for such a layer, or use ReferenceExecutor()."


@final
@frozen(cache_hash=True)
class GatherExecutor(Executor[Permutation, RankedBlockMask]):
    """Visit a row's kept blocks by rank and stop when they add little (S2O, algorithms 2 and 3).

    Blocks of a negative rank are visited first and in any case. The gain of a later block is what it adds to a
    query's softmax denominator. The query is satisfied if the gain is less than the share `tau` of the denominator
    before it, both relative to the same running maximum. A row of blocks stops when its queries are satisfied. The
    output is attention over exactly the blocks that it reports as `visited`.

    Tokens are loaded through the index map and never moved, so each query group may have its own map. On a GPU a
    Triton kernel runs (fp16, bf16, fp32; query blocks up to 128). Hopper has its own kernel for half precision,
    head dims 64 and 128, and `commit=True`. It takes query blocks of 64 or 128, and key blocks of 32, 64 or a
    multiple of the query block. CPU tensors and float64 take plain torch. All of these visit the same blocks.

    Args:
        tau: bound of the gain, a number or one per query head. With 0 no row stops early. The paper prints no
            value.
        reduction: `"all"` stops a row when all its queries are satisfied. `"mean"` stops it when the mean of their
            gains, each divided by its denominator, is below `tau`. The paper does not say.
        patience: after so many such blocks in succession a row stops. `1` as in the paper.
        commit: include the block after which a row stops in the output. The printed algorithm drops it.
    """

    tau: PerHead = field(default=0.01, converter=per_head, validator=at_least_0, repr=written)
    reduction: str = field(default="all", validator=one_of("all", "mean"), kw_only=True)
    patience: int = field(default=1, converter=whole, validator=size, kw_only=True)
    commit: bool = field(default=True, validator=flag, kw_only=True)
    _opaque: OpaqueExecutor = field(
        init=False, repr=False, eq=False, default=Factory(lambda self: OpaqueExecutor(self), takes_self=True)
    )

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, mask: RankedBlockMask, spec: AttentionSpec
    ) -> list[str]:
        reasons = super().unsupported(q, k, v, mask, spec)
        if q.is_cuda and q.dtype != torch.float64:
            if find_spec("triton") is None:
                reasons.append("triton is not installed")
            if mask.grid.q_block > 128:
                reasons.append(f"query blocks must be at most 128, not {mask.grid.q_block}: choose smaller ones")
            reasons += without_tensor_cores(q)
        reasons += wrong_heads("tau", self.tau, mask.grid.q_heads)
        return reasons or never_launched(*self._kernels(q, v, mask))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: RankedBlockMask,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> AttentionOutput:
        if is_transformed():
            return execute_op(self._opaque, q, k, v, mask, spec, mask.rank).written_to(out)
        self.check(q, k, v, mask, spec, out, hint=_HINT)
        grid, keep = mask.grid, mask.per_query_head()
        rank = mask.rank
        if rank.shape != keep.shape:
            rank = rank.repeat_interleave(grid.q_heads // grid.kv_heads, 1)
        tau = by_head(self.tau, q)
        lists = RankedLists(*visiting_order(keep, rank, tau), grid.q_block, grid.k_block)
        rule = StopRule(tau, min(self.patience, FAR), self.commit, self.reduction == "mean")

        def attend(kernel: str) -> tuple[Tensor, Tensor, Tensor]:
            return gather_attention(q, k, v, lists, grid.positions, rule, scale=spec.scale, kernel=kernel)

        kernels, of = self._kernels(q, v, mask)
        result, lse, blocks = first_launched(
            kernels, of, attend, lambda: self.check(q, k, v, mask, spec, out, hint=_HINT)
        )

        return AttentionOutput(result, lse, partial(_visited, blocks, lists.index, grid)).written_to(out)

    def _kernels(self, q: Tensor, v: Tensor, mask: RankedBlockMask) -> tuple[tuple[str, ...], Hashable]:
        """The kernels that take these inputs, the fastest first; and for what inputs."""
        grid = mask.grid
        of = "gather", q.device, q.dtype, q.shape[-1], v.shape[-1], grid.q_block, grid.k_block, self.commit
        return kernels_for(q, v, grid.q_block, grid.k_block, self.commit), of


def _visited(blocks: Tensor, index: Tensor, grid: Grid) -> BlockMask:
    return BlockMask(listed(blocks, index, grid.cols), grid)

"""The values of one call of a pipeline: all of them in a `Trace`, and the blocks that it chose in a `Choice`."""

from __future__ import annotations

from functools import cached_property
from typing import Generic, TypeVar, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.execute.executor import AttentionOutput
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.order.permutation import Permutation
from blocksparse.score.scorer import BlockScores
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

PermutationT = TypeVar("PermutationT", bound=Permutation)
ScoresT = TypeVar("ScoresT", bound=BlockScores)
MaskT = TypeVar("MaskT", bound=BlockMask)


@final
@frozen(eq=False)
class Trace(Generic[PermutationT, ScoresT, MaskT]):
    """Every value of one call. The methods compute their result when they are called, one row of blocks at a time.

    q, k and v are those of the call, not copies: later results depend on their contents at that time. With a
    sliding window, dense attention means dense attention within it.
    """

    # q, k and v are those that the stages got: in one dtype, with q negated if the caller's scale was negative.
    q: Tensor  # [B, Hq, M, D]
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, Dv]
    spec: AttentionSpec  # its scale is above 0
    permutation: PermutationT
    scores: ScoresT
    mask: MaskT
    output: AttentionOutput
    dense_because: str | None = None  # why the executor attended densely, if it did
    age: int | None = None  # of a mask that is reused: how many steps ago it was chosen

    @cached_property
    def visited(self) -> BlockMask:
        """The blocks that were computed: those of the mask, fewer after an early stop, all in a dense call."""
        visited = self.output.visited
        return self.mask if visited is None else visited

    def density(self) -> Tensor:
        """The work done, as a share of the work of dense attention, `[B, Hq]`. See `BlockMask.density`."""
        density = self.visited.density()
        return density.repeat_interleave(self.q.shape[1] // density.shape[1], dim=1)

    def covered_mass(self) -> Tensor:
        """The share of the dense attention weights that lies on visited pairs, mean over queries, `[B, Hq]`.

        A sink is not a pair, so its share of the softmax does not count.
        """
        total = self.q.new_zeros(self.q.shape[:2], dtype=torch.float64)
        for row in range(self.visited.grid.rows):
            weight, _, allowed = self._dense_row(row)
            total += weight.where(allowed, 0.0).sum((-1, -2))
        return total / self.q.shape[2]

    def error(self) -> Tensor:
        """The relative L1 distance `sum|o - o'| / sum|o'|` of the output `o` from dense `o'`, `[B, Hq]`."""
        distance = self.q.new_zeros(self.q.shape[:2], dtype=torch.float64)
        norm = torch.zeros_like(distance)
        values = self.v.to(wide_dtype(self.v)).mT
        for row in range(self.visited.grid.rows):
            query, (weight, lse, _) = self.visited.queries(row), self._dense_row(row)
            dense = self.spec.with_sinks(products(weight, values), lse)[0].double()
            index = query.unsqueeze(-1).expand(*query.shape, dense.shape[-1])
            distance += (self.output.out.gather(2, index).double() - dense).abs().sum((-1, -2))
            norm += dense.abs().sum((-1, -2))
        return distance / norm

    def _dense_row(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a row of blocks: dense weights without sinks `[B, Hq, m, N]`, lse `[B, Hq, m]` and visited pairs."""
        query, allowed = self.visited.queries(row), self.visited.pairs(row)
        rows = self.q.gather(2, query.unsqueeze(-1).expand(*query.shape, self.q.shape[-1]))
        logits = self.spec.capped(products(*(x.to(wide_dtype(x)) for x in (rows, self.k))) * self.spec.scale)
        grid, key = self.visited.grid, torch.arange(self.k.shape[2], device=query.device)
        logits = logits.masked_fill(
            ~grid.is_visible((query + grid.first_position).unsqueeze(-1), key), float("-inf")
        )
        return logits.softmax(-1), logits.logsumexp(-1), allowed


@final
@frozen(eq=False)
class Choice(Generic[MaskT]):
    """The selected blocks of a call, from the first three stages of a pipeline; `Pipeline.attend` runs the fourth.

    It may be attended to again: with other values, in a later denoising step, or in another layer. Then the blocks
    are those that were chosen here, and attention over them is exact.
    """

    mask: MaskT
    spec: AttentionSpec  # as the caller asked for it
    head_dim: int
    dtype: torch.dtype

    def check_fits(self, q: Tensor, k: Tensor) -> None:
        """Refuse a choice that was made for other tensors than `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`.

        Raises:
            ValueError: sizes, devices or the precision of dtypes differ.
        """
        grid, device = self.mask.grid, self.mask.keep.device
        mine = grid.batch, grid.q_heads, grid.kv_heads, grid.q_len, grid.k_len, self.head_dim
        its = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]
        if mine != its:
            raise ValueError(
                f"this choice was made for (B, Hq, Hkv, M, N, D) = {mine}, and q and k have {its}. Call choose() "
                "again."
            )
        if device != q.device:
            raise ValueError(f"this choice lies on {device}, and q and k are on {q.device}. Call choose() again.")
        if self.dtype.itemsize != q.dtype.itemsize:
            raise ValueError(
                f"this choice was made for {self.dtype}, and q and k are {q.dtype}. Call choose() again."
            )

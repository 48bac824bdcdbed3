"""Blocks that are not kept take part by their means (Sol-Attn, arXiv 2607.24027; FlashPrefill V2, 2608.19758)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import a
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor, one_order
from blocksparse.geometry import Grid
from blocksparse.kernels.multiplying.products import products, wide_dtype
from blocksparse.kernels.scoring.block_mean import block_mean
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.selectors.block_mask import BlockMask

_LOGITS = 2**26  # that are held at a time


@final
@frozen(cache_hash=True)
class RemainderExecutor(Executor[GlobalPermutation, BlockMask]):
    """Attend to kept blocks exactly by `inner`, and to the others by their mean keys and mean values.

    A block of `n` keys that is not kept enters the softmax of a query as `n` keys that are their mean, with the
    mean value. Only blocks that every query of their row sees whole do, so that no query learns of a later key; of
    the others, and of those that a sliding window cuts, nothing is taken. `out` and `lse` contain this remainder,
    and `visited` is what `inner` computed exactly.

    On a small language model it was worth 3 to 10 % of the divergence from dense attention where blocks were kept
    by mass, and did harm where a small fixed number was kept. It multiplies every query with every mean key, in
    plain torch and some rows at a time.

    Args:
        inner: an executor that gives an lse: all do, but for `FlexExecutor` on a CPU.

    Raises:
        ValueError: `inner` is a `RemainderExecutor` itself; in a call, if it gives no lse.
    """

    inner: Executor[GlobalPermutation, BlockMask] = field(validator=a(Executor))

    def __attrs_post_init__(self) -> None:
        if isinstance(self.inner, RemainderExecutor):
            raise ValueError(
                "'inner' must not be a RemainderExecutor, since what is not kept would count twice: give the "
                "executor that it has inside, or leave out remainder=True"
            )

    @property
    def may_be_left_out(self) -> bool:
        return self.inner.may_be_left_out

    def dense_because(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
        return self.inner.dense_because(q, k, v, spec)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return self.inner.unsupported(q, k, v, mask, spec)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out)
        exact = self.inner(q, k, v, mask, spec)
        if exact.lse is None:
            name = type(self.inner).__name__
            raise ValueError(
                f"'RemainderExecutor' joins outputs by their lse, and {name} gives none: take another"
            )
        rest, lse = (one_order(mask).restore(x) for x in _remainder(q, k, v, mask, spec))
        together = torch.logaddexp(exact.lse.to(lse.dtype), lse)
        of_exact, of_rest = ((x.to(lse.dtype) - together).exp().unsqueeze(-1) for x in (exact.lse, lse))
        # Where a query sees no remainder, not a bit of its output changes.
        joined = exact.out.to(rest.dtype) * of_exact + rest * of_rest
        joined = torch.where((lse == float("-inf")).unsqueeze(-1), exact.out.to(rest.dtype), joined)
        result = AttentionOutput(joined.to(exact.out.dtype), together.to(exact.lse.dtype), exact.visit)
        return result.written_to(out)


def _remainder(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention of queries in slot order to the means alone: `[B, Hq, M, Dv]` and its lse `[B, Hq, M]`."""
    grid, permutation = mask.grid, one_order(mask)
    queries = permutation.gather_queries(q)
    keys, values = (block_mean(x, grid.k_block, index=permutation.key_slots) for x in (k, v))  # [B, H, cols, ...]
    keys = keys.to(q.dtype)  # which multiplies on tensor cores, as in the authors' code
    sizes = (grid.k_position[:, :, 0].unflatten(-1, (-1, grid.k_block)) >= 0).sum(-1)  # [B|1, H|1, cols]
    weight = _per_query_head(sizes, grid).to(wide_dtype(q)).log().unsqueeze(2)
    dropped = ~mask.per_query_head() & _seen_whole(grid)
    bad = ~values.isfinite()  # which 0 times the share of a query that does not take it would not keep out
    values, spoils = values.masked_fill(bad, 0.0), _per_query_head(bad.any(-1), grid).unsqueeze(2)
    B, Hq, M, _ = q.shape
    step = max(1, _LOGITS // (B * Hq * grid.q_block * grid.cols))
    parts = []
    for top in range(0, grid.rows, step):
        bottom = min(top + step, grid.rows)
        first, last = (min(max(row * grid.q_block - grid.q_lead, 0), M) for row in (top, bottom))
        lead = grid.q_lead if top == 0 else 0
        taken = dropped[:, :, top:bottom].repeat_interleave(grid.q_block, 2)[:, :, lead : lead + last - first]
        logits = spec.capped(products(queries[:, :, first:last], keys) * spec.scale) + weight
        logits = logits.masked_fill(~taken, float("-inf"))
        lse = logits.logsumexp(-1)
        shares = (logits - lse.unsqueeze(-1)).exp().masked_fill(~taken, 0.0)
        part = products(shares, values.mT)
        parts.append((part.masked_fill((taken & spoils).any(-1, keepdim=True), float("nan")), lse))
    return torch.cat([x for x, _ in parts], 2), torch.cat([x for _, x in parts], 2)


def _seen_whole(grid: Grid) -> Tensor:
    """The blocks of which every query of their row sees every key, `[B|1, H|1, rows, cols]`; they may be short."""
    there = grid.k_last >= 0
    if not grid.causal:
        return there & (grid.q_last >= 0)
    seen = there & (grid.k_last <= grid.q_first)
    return seen if grid.window is None else seen & (grid.k_first > grid.q_last - grid.window)


def _per_query_head(x: Tensor, grid: Grid) -> Tensor:
    return x if x.shape[1] in (1, grid.q_heads) else x.repeat_interleave(grid.q_heads // x.shape[1], dim=1)

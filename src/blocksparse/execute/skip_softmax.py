"""Attention without negligible tiles of keys, by a threshold that falls with the prompt's length (BLASST)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.check.per_head import over_blocks
from blocksparse.check.validators import positive, real, shown
from blocksparse.execute.executor import AttentionOutput, Executor, one_order
from blocksparse.execute.triton import TritonExecutor
from blocksparse.kernels.attention.cpu_attention import Kept, cpu_attention, cpu_kernel_refuses, may_skip
from blocksparse.kernels.common.sizes import for_heads
from blocksparse.kernels.common.tiles import tuned
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_HINT = "Use AutoExecutor(), which leaves out no tiles."


@final
@frozen(cache_hash=True)
class SkipSoftmaxExecutor(Executor[GlobalPermutation, BlockMask]):
    """Leave out tiles of keys whose weights are below `scale_factor / N` of the greatest met so far (2512.12087).

    A query leaves out a tile if the tile's greatest logit lies more than `ln(N / scale_factor)` below the greatest
    one so far. `N` is the number of keys of the call. This applies to blocks that the query sees whole. Each query
    decides for itself. If `m` keys are left out, at most the share `m scale_factor / N` of the query's mass is
    lost. Prompts of up to `scale_factor` keys are attended exactly. `visited` of the output, and so
    `trace.density()`, says which blocks some query of their row did not leave out. On a GPU `visited` is computed
    when it is read, in plain torch, which is many times slower than the call. A `DensityRecorder` reads it in
    every call.

    On a GPU it is `TritonExecutor(pv_skip=...)`, which computes the logits of every tile. It saves the rest of the
    work of the tiles that all queries of a tile leave out. On a CPU the compiled kernel does the same, for query
    blocks of up to 128 tokens and key blocks of 32, 64, 96 or 128. Other blocks run in plain torch, which saves
    nothing.

    Args:
        scale_factor: the threshold at one key, above 0. 1000 in TensorRT-LLM's examples, 5000 for video.
    """

    scale_factor: float = field(default=1000.0, converter=real, validator=positive)

    @classmethod
    def calibrated(cls, config: object, sparsity: float | None = None) -> SkipSoftmaxExecutor:
        """With the factor that ModelOpt found for a checkpoint, `a * exp(b * sparsity)`.

        Args:
            config: of the checkpoint: what transformers makes of its config.json, or that as a dict. ModelOpt
                writes `sparse_attention_config` into it.
            sparsity: the share of tiles to leave out. That of the checkpoint, else 0.5, if None.

        Raises:
            ValueError: the checkpoint has no such factors for prefill.
        """
        found = config if isinstance(config, Mapping) else vars(config)
        own: Any = found.get("sparse_attention_config")
        own = own if isinstance(own, Mapping) else {}
        factors = own.get("threshold_scale_factor")
        phase = factors.get("prefill") if isinstance(factors, Mapping) else None
        if not isinstance(phase, Mapping) or not {"a", "b"} <= phase.keys():
            raise ValueError(
                "'config' must have sparse_attention_config['threshold_scale_factor']['prefill'] with 'a' and "
                f"'b', which ModelOpt's calibration writes: {shown(own)}"
            )
        if sparsity is None:
            target = own.get("target_sparse_ratio", 0.5)
            sparsity = target.get("prefill", 0.5) if isinstance(target, Mapping) else target
        return cls(float(phase["a"]) * math.exp(float(phase["b"]) * float(sparsity)))

    def threshold(self, keys: int) -> float | None:
        """The difference of logits from which on tiles are left out, below 0; None where none is."""
        return None if keys <= self.scale_factor else math.log(self.scale_factor / keys)

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return self._kernel(k).unsupported(q, k, v, mask, spec) if q.is_cuda else []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint=_HINT)
        tile, skip = mask.grid.k_block, self.threshold(k.shape[2])
        if not q.is_cuda:
            kept = Kept(mask.keep, mask.grid.q_block, tile)
            if not may_skip(kept, mask.grid.positions) or cpu_kernel_refuses(q, k, v):
                return _attend(q, k, v, mask, spec, skip, tile).written_to(out)
            taken = None if skip is None else mask.per_query_head().clone(memory_format=torch.contiguous_format)
            written = cpu_attention(
                q, k, v, kept, mask.grid.positions, scale=spec.scale, change=spec.for_kernel(q), skip=skip,
                taken=taken, out=out,
            )  # fmt: skip
            visited = None if taken is None else BlockMask(taken, mask.grid)
            return AttentionOutput(*written, visited).written_to(out)
        done = self._kernel(k)(q, k, v, mask, spec, out)
        if skip is None:
            return done
        tile = tuned(q, k, v, mask.grid.q_block, mask.grid.k_block, plain=False).block_n
        return AttentionOutput(done.out, done.lse, partial(_visited, q, k, v, mask, spec, skip, tile))

    def _kernel(self, k: Tensor) -> TritonExecutor:
        return TritonExecutor(pv_skip=self.threshold(k.shape[2]))


def _visited(*arguments: Any) -> BlockMask:
    visited = _attend(*arguments).visited
    assert visited is not None
    return visited


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, skip: float | None, tile: int
) -> AttentionOutput:
    """The attention in plain torch, a row of blocks at a time: tiles of `tile` keys, in the order of slots."""
    grid, keep, permutation = mask.grid, mask.per_query_head(), one_order(mask)
    dtype, (B, Hq, M, _) = wide_dtype(q), q.shape
    missing = grid.cols * grid.k_block - k.shape[2]
    keys, values = (
        pad(x, (0, 0, 0, missing)).to(dtype) for x in permutation.gather_keys_and_values(k, v)
    )  # [B, H, slots, D]
    k_at = for_heads(grid.k_position[:, :, 0], Hq)  # [B|1, H|1, slots]
    full = grid.full & keep
    sink = over_blocks(float("-inf") if spec.sinks is None else spec.sinks, keep).to(dtype)
    result, lse = q.new_zeros((B, Hq, M, v.shape[-1]), dtype=v.dtype), q.new_zeros((B, Hq, M), dtype=dtype)
    visited = keep.clone()
    for row in range(grid.rows):
        query = mask.queries(row)  # [B, Hq, m]
        rows = q.gather(2, query.unsqueeze(-1).expand(*query.shape, q.shape[-1])).to(dtype)
        taken = keep[:, :, row].repeat_interleave(grid.k_block, -1).unsqueeze(2)
        allowed = taken & grid.is_visible((query + grid.first_position).unsqueeze(-1), k_at.unsqueeze(2))
        logits = spec.capped(products(rows, keys) * spec.scale).masked_fill(~allowed, float("-inf"))
        if skip is not None:
            whole = full[:, :, row].repeat_interleave(grid.k_block // tile, -1).unsqueeze(2)  # [B, Hq, 1, tiles]
            best = logits.unflatten(-1, (-1, tile)).amax(-1)
            met = best.masked_fill(~whole, float("-inf")).cummax(-1).values
            skipped = whole & (best - pad(met[..., :-1], (1, 0), value=float("-inf")) < skip)
            logits = logits.masked_fill(skipped.repeat_interleave(tile, -1), float("-inf"))
            visited[:, :, row] &= ~skipped.all(2).unflatten(-1, (grid.cols, -1)).all(-1)
        peak = logits.amax(-1, keepdim=True).maximum(sink)
        origin = peak.masked_fill(peak == float("-inf"), 0.0)
        weight = (logits - origin).exp()
        total = weight.sum(-1, keepdim=True) + (sink - origin).exp()
        seen = allowed.any(2).unsqueeze(-1)  # not even 0 times infinity comes from values that no query sees
        part = _weighted(weight / total.masked_fill(total == 0, 1.0), values, seen)
        part = part.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        result.scatter_(2, query.unsqueeze(-1).expand(part.shape), part.to(result.dtype))
        lse.scatter_(2, query, (total.log() + peak).squeeze(-1))
    return AttentionOutput(result, lse.to(wide_dtype(q)), None if skip is None else BlockMask(visited, grid))


def _weighted(weight: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`weight` `[B, Hq, m, slots]` times `values` `[B, H, slots, Dv]` as far as somebody sees them."""
    H = values.shape[1]
    by_group = seen.expand(*weight.shape[:2], -1, 1).unflatten(1, (H, -1)).any(2)
    return products(weight, values.masked_fill(~by_group, 0.0).mT)

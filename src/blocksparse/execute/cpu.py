"""The default on a CPU: a compiled kernel, or without one, plain products with the gathered kept keys."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import UserError
from blocksparse.execute.executor import AttentionOutput, Executor
from blocksparse.inputs import differentiates
from blocksparse.kernels.attention.cpu_attention import (
    SOURCE,
    Kept,
    cpu_attention,
    cpu_kernel,
    cpu_kernel_refuses,
    cpu_products,
)
from blocksparse.kernels.common.compiled import UnavailableError, compile_for_wheel, load
from blocksparse.kernels.common.sizes import empty_as, for_heads
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.score import cpu_scores
from blocksparse.order.permutation import Permutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_LARGE_LSE = 1024.0  # up to which fp32 holds logits to 6e-5
_ROWS = 256  # queries whose logits `_attend_by_rows` holds at a time


@final
@frozen(cache_hash=True)
class CpuExecutor(Executor[Permutation, BlockMask]):
    """Attention by a C++ kernel that is compiled for this CPU at the first call, in seconds.

    The kernel takes fp32, bf16 and fp16, head dims up to 256, and any permutation, window, softcap and sinks. It
    sums in fp32, and multiplies bf16 as it is where the CPU can. The number of threads changes no bit of its
    output. `runs_by` says whether it is in use, and `blocksparse build` compiles it beforehand.

    For float64, tensor subclasses and larger head dims, and where nothing can be compiled (logged once), plain
    products run instead. They take one row of blocks of a head at a time, and gather the keys that it keeps. They
    compute in fp32, or in float64 for float64 and for queries whose lse exceeds 1024.
    """

    def unsupported(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec) -> list[str]:
        return [f"it runs on a CPU, and these tensors are on {q.device.type}"] * (q.device.type != "cpu")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        self.check(q, k, v, mask, spec, out, hint="Use TritonExecutor() or AutoExecutor() on a GPU.")
        if not cpu_kernel_refuses(q, k, v):
            kept, change = Kept(mask.keep, mask.grid.q_block, mask.grid.k_block), spec.for_kernel(q)
            written = cpu_attention(q, k, v, kept, mask.grid.positions, scale=spec.scale, change=change, out=out)
            return AttentionOutput(*written).written_to(out)
        result, lse = _attend_by_rows(q, k, v, mask, spec)
        large = (lse.abs() > _LARGE_LSE) & lse.isfinite()
        # Each query decides for itself, so no bit of it depends on others.
        if wide_dtype(q) != torch.float64 and bool(large.any()):
            wide_result, wide_lse = _attend_by_rows(q.double(), k.double(), v.double(), mask, spec)
            result = torch.where(large.unsqueeze(3), wide_result.to(result.dtype), result)
            lse = torch.where(large, wide_lse, lse)
        return AttentionOutput(result.to(v.dtype), lse.to(wide_dtype(q))).written_to(out)

    def runs_by(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """The implementation that runs these inputs: the compiled kernel, or plain products and why."""
        if reasons := cpu_kernel_refuses(q, k, v):
            return f"plain products, since the compiled one cannot: {'; '.join(reasons)}"
        return "the compiled kernel"


def _attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Output `[B, Hq, M, Dv]` and lse `[B, Hq, M]` in original order, of some queries of one head at a time."""
    grid, keep, dtype = mask.grid, mask.per_query_head(), wide_dtype(q)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    full = for_heads(grid.full, grid.q_heads).expand(keep.shape)
    out = empty_as(q, v.shape[3], dtype).zero_()
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)  # so that sinks are added exactly
    for row in range(grid.rows):
        queries, slots = mask.queries(row), mask.slots(row)
        for b, h in keep[:, :, row].any(2).nonzero().tolist():
            kept, whole, of = keep[b, h, row], full[b, h, row], h * k.shape[1] // grid.q_heads
            everywhere, somewhere = slots[b, h][kept & whole].flatten(), slots[b, h][kept & ~whole].flatten()
            for query in queries[b, h].split(_ROWS):
                seen = grid.is_visible((query + grid.first_position).unsqueeze(1), somewhere)
                there = seen.any(0)
                key = torch.cat((everywhere, somewhere[there]))
                if not len(key):
                    continue
                its_k, its_v = (x[b, of].index_select(0, key) for x in (k, v))
                logits = products(q[b, h, query][None, None], its_k[None, None])[0, 0]
                logits = spec.capped(logits.mul_(spec.scale))
                logits[:, len(everywhere) :].masked_fill_(~seen[:, there], float("-inf"))
                peak = logits.amax(1, keepdim=True)
                nothing = peak == float("-inf")
                weight = logits.sub_(peak.masked_fill(nothing, 0.0)).exp_()
                total = weight.sum(1, keepdim=True)
                lse[b, h, query] = (total.double().log() + peak).squeeze(1)
                # A weight of 0 must not meet an infinite value where a query sees no key.
                sums = products(weight[None, None], its_v.mT[None, None])[0, 0]
                out[b, h, query] = (sums / total).masked_fill_(nothing, 0.0)
    return spec.with_sinks(out, lse)


_SOURCES = SOURCE, cpu_scores.SOURCE

# Queries of a call from which the kernel is faster than PyTorch's: it packs keys first, which pays off with many.
_QUERIES = 64


def takes_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel runs dense attention on these inputs, where it is faster than PyTorch's."""
    return q.shape[2] >= _QUERIES and not differentiates(q, k, v) and not cpu_kernel_refuses(q, k, v)


def about_kernel() -> str:
    """A phrase for error messages: attention on this CPU runs by the compiled kernel, or the reason why not."""
    found = cpu_kernel()
    if found.why_not is not None:
        return f"no compiled kernel: {found.why_not}"
    return f"compiled kernel, which multiplies bf16 as {cpu_products()}"


def compile_kernels() -> list[tuple[Path | None, float]]:
    """Compile the kernels again. Return the path of each, None if it cannot be kept, and the seconds it took."""
    made = []
    for source in _SOURCES:
        found = load(source, anew=True)
        if found.why_not is not None:
            raise UserError(f"{source.name} cannot be compiled: {found.why_not}")
        made.append((found.path, found.seconds))
    return made


def compile_kernels_for_wheel(package: Path) -> list[Path]:
    """Compile the kernels for every kind of CPU that a wheel serves, into `package`, this package's folder."""
    home = SOURCE.parents[2]
    try:
        return [
            path
            for source in _SOURCES
            for path in compile_for_wheel(source, package / source.relative_to(home).parent / "compiled")
        ]
    except UnavailableError as error:
        raise UserError(f"the kernels cannot be compiled: {error}") from None

"""The table `whole_blocks`: calls that are not causal, in whole blocks, beside cuDNN's block-sparse kernels.

Every row of blocks keeps as many blocks, as cuDNN's 8-bit kernel asks, and each query head has a KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.inputs import QKV
from benchmarks.kernel_tables import Row, pairs_kept
from benchmarks.timing import Call, Candidate, CannotRunError, attempt, check, measure, relative_l1, release
from blocksparse.execute.launched import BlockPlan
from blocksparse.execute.packages import to_cudnn
from blocksparse.kernels.attention.sparse_attention import sparse_attention
from blocksparse.kernels.common.tiles import tuned

OURS, EIGHT, CUDNN, SPLIT, FP8 = "TritonExecutor", "Int8Executor", "cuDNN", "cuDNN, rows split", "cuDNN, fp8"
ROUNDED = 0.1  # what 8 bits may err in an attended row, of its norm


def whole_blocks(plan: Plan, device: torch.device) -> Iterator[Row]:
    """Kernels with their lists beforehand; those of 8 bits with their rounding."""
    for heads, N, D, block, kept in plan.whole_blocks:
        point = {"heads": heads, "N": N, "D": D, "block": block, "kept": kept, "of": N // block}
        yield attempt(point, partial(_row_of, heads, N, D, block, kept, plan, device))


def _row_of(heads: int, N: int, D: int, block: int, kept: int, plan: Plan, device: torch.device) -> Row:
    release(device)
    q, k, v = (torch.randn(1, heads, N, D, device=device, dtype=plan.dtype) for _ in range(3))
    mask, spec = some_blocks(q, k, block, kept), bs.AttentionSpec(scale=D**-0.5, causal=False)
    errors: dict[str, float] = {}

    def near(name: str, tolerance: float) -> Callable[[Tensor], None]:
        def verify(out: Tensor) -> None:
            check(out, q, k, v, mask, tolerance=tolerance)
            errors[name] = float(relative_l1(out[:, :, :block], exact[:, :, :block]).mean())

        return verify

    candidates = {
        OURS: Candidate(partial(kernel_call, (q, k, v), mask, spec), near(OURS, 1e-2)),
        CUDNN: Candidate(partial(cudnn_call, (q, k, v), mask, spec, 1), near(CUDNN, 1e-2)),
        SPLIT: Candidate(partial(cudnn_call, (q, k, v), mask, spec, "auto"), near(SPLIT, 1e-2)),
        EIGHT: Candidate(partial(executor_call, bs.Int8Executor(), (q, k, v), mask, spec), near(EIGHT, ROUNDED)),
        FP8: Candidate(partial(cudnn_fp8_call, (q, k, v), mask, spec), near(FP8, ROUNDED)),
    }
    exact = kernel_call((q, k, v), mask, spec)()
    figures = measure(candidates, device=device, budget_ms=plan.budget_ms)
    return {
        "tflop": 4e-12 * D * pairs_kept(mask),
        "l1": errors,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


def some_blocks(q: Tensor, k: Tensor, block: int, kept: int) -> bs.BlockMask:
    """`kept` random blocks in each row of a call that is not causal."""
    spec = bs.AttentionSpec(scale=1.0, causal=False)
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(), spec, q_block=block, k_block=block)
    order = torch.rand(1, q.shape[1], grid.rows, grid.cols, device=q.device)
    chosen = order.topk(kept, sorted=False).indices
    return bs.BlockMask(torch.zeros_like(order, dtype=torch.bool).scatter_(-1, chosen, True), grid)


def kernel_call(qkv: QKV, mask: bs.BlockMask, spec: bs.AttentionSpec) -> Call:
    """The kernel of `TritonExecutor`."""
    _refuse(bs.TritonExecutor(), qkv, mask, spec)
    plan, grid = BlockPlan.of(mask), mask.grid
    tiles = tuned(*qkv, grid.q_block, grid.k_block)
    return lambda: sparse_attention(*qkv, plan, grid.positions, tiles, scale=spec.scale)[0]


def executor_call(executor: bs.Executor[Any, Any], qkv: QKV, mask: bs.BlockMask, spec: bs.AttentionSpec) -> Call:
    """An executor, block lists and rounding included."""
    _refuse(executor, qkv, mask, spec)
    return lambda: executor(*qkv, mask, spec).out


def cudnn_call(qkv: QKV, mask: bs.BlockMask, spec: bs.AttentionSpec, splits: int | str) -> Call:
    """cuDNN's kernel in the inputs' precision, told that all rows keep as many blocks."""
    _refuse(bs.CudnnExecutor(), qkv, mask, spec)
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    index, count = _fixed(mask)
    run: Callable[..., Any] = partial(
        block_sparse_attention_forward, *qkv, index, block_sparse_num=count, sparse_block_size=mask.grid.q_block,
        softmax_scale=spec.scale, kv_splits=splits,
    )  # fmt: skip
    return lambda: run()["o_tensor"]


def cudnn_fp8_call(qkv: QKV, mask: bs.BlockMask, spec: bs.AttentionSpec) -> Call:
    """cuDNN's kernel in fp8, rounding included."""
    _refuse(bs.CudnnExecutor(), qkv, mask, spec)
    from cudnn.block_sparse_attention import block_sparse_attention_fp8_forward

    index, count = _fixed(mask)
    run: Callable[..., Any] = partial(
        block_sparse_attention_fp8_forward, *qkv, index, block_sparse_num=count, softmax_scale=spec.scale,
        sparse_block_size=mask.grid.q_block,
    )  # fmt: skip
    return lambda: run()["o_tensor"]


def _fixed(mask: bs.BlockMask) -> tuple[Tensor, int]:
    """The lists as cuDNN takes them, cut to the number of blocks that every row keeps."""
    index, count = to_cudnn(mask)
    kept = int(count[0, 0, 0])
    return index[..., :kept].contiguous(), kept


def _refuse(executor: bs.Executor[Any, Any], qkv: QKV, mask: bs.BlockMask, spec: bs.AttentionSpec) -> None:
    if reasons := executor.unsupported(*qkv, mask, spec):
        raise CannotRunError("; ".join(reasons))

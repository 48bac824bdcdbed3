"""Attention of whole sequences, or of a chunk of their queries, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attrs import evolve
from torch import Tensor

from blocksparse.distributed.call import Call
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.execute.executor import AttentionOutput
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.order.permutation import Permuter
from blocksparse.score.scorer import ValueScorer

Later = Callable[[], Tensor]
"""Waits for a tensor that is on its way, and returns it."""


def is_dense(pipeline: AnyPipeline, q: Tensor, k: Tensor, Dv: int, call: Call, *, M: int, N: int) -> bool:
    """Whether the executor would have the whole call, of `M` queries and `N` keys in all heads, attend densely."""
    if call.with_lse:
        return False
    B, D = q.shape[0], q.shape[3]
    # Shapes, dtype and device are all that an executor may ask for, so these tensors take no memory.
    shapes = (B, call.Hq, M, D), (B, call.Hkv, N, D), (B, call.Hkv, N, Dv)
    all_q, all_k, all_v = (x.new_empty(()).expand(shape) for x, shape in zip((q, k, k), shapes, strict=True))
    return pipeline.dense_because(all_q, all_k, all_v, call.spec) is not None


def attend(
    pipeline: AnyPipeline,
    q: Tensor,
    k: Tensor,
    v: Later,
    call: Call,
    *,
    dense: bool,
    permuter: Permuter[Any] | None = None,
) -> AttentionOutput:
    """Attention of `q` `[B, Hq, M, D]`, the last queries of a causal call, to `k` `[B, Hkv, N, D]`.

    Blocks are chosen before `v` is waited for, unless the scorer judges by values. The output says which blocks
    were visited, unless it is dense.

    Args:
        permuter: what orders tokens instead of the pipeline's own permuter.

    Raises:
        ValueError: the call is for an lse, and the executor gives none.
    """
    if dense:
        return AttentionOutput(dense_attention(q, k, v(), call.spec), None)
    if permuter is not None:
        pipeline = evolve(pipeline, permuter=permuter)
    values = v() if isinstance(pipeline.scorer, ValueScorer) else None
    choice = pipeline.choose(q, k, values, **call.spec.arguments())
    output = pipeline.attend(q, k, v() if values is None else values, choice)
    if call.with_lse and output.lse is None:
        raise ValueError(
            f"{type(pipeline.executor).__name__} gives no lse for tensors on {q.device.type}: call without it, or "
            "choose another executor"
        )
    return replace(output, visit=output.visit or choice.mask)

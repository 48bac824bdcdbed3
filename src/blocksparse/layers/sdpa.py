"""A pipeline behind the signature of PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from blocksparse.check.validators import a, flag, shown
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.pipeline import Pipeline

_pipeline, _tensor = a(Pipeline, HeadGroups), a(Tensor)  # here, since torch.compile traces calls


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pipeline: LayerPipeline,
) -> Tensor:
    """Attend by `pipeline`, with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

        scaled_dot_product_attention(q, k, v, is_causal=True, pipeline=pbs_attn())

    As there, attention is not causal unless `is_causal` says so; `pipeline(q, k, v)` is. What a pipeline cannot
    honour is refused.

    Args:
        query: `[B, Hq, M, D]`.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        attn_mask: must be None. The pipeline selects its own blocks.
        dropout_p: must be 0.
        is_causal: whether query `i` sees only the keys up to position `i`. There must be as many queries as keys.
        scale: factor of the logits. `1 / sqrt(D)` if None.
        enable_gqa: whether there may be fewer heads of keys than of queries.
        pipeline: what attends: a `Pipeline` or `HeadGroups`.

    Raises:
        TypeError, ValueError: a pipeline does not do what an argument asks for, or cannot run these inputs.
    """
    _pipeline.check(pipeline=pipeline)
    _tensor.check(query=query, key=key, value=value)
    flag.check(is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None:
        raise ValueError(
            f"'attn_mask' must be None, since the pipeline selects blocks: {shown(attn_mask)}. Say "
            "is_causal=True for a causal mask. For other masks call pipeline(q, k, v, ...), with "
            "sequences=Sequences.padded(mask [B, N]) to leave padding out, sequences=Sequences.packed(lengths) to "
            "separate prompts, window=tokens for a sliding window. Others need PyTorch's function."
        )
    if dropout_p:
        raise ValueError(f"'dropout_p' must be 0, because pipelines are for inference: {shown(dropout_p)}")
    if query.ndim == key.ndim == 4:
        (_, Hq, M, _), (_, Hkv, N, _) = query.shape, key.shape
        if is_causal and M != N:
            raise ValueError(
                f"'is_causal' needs as many queries as keys here: {M} and {N}. PyTorch's function lets query i "
                "see the keys up to i. Pipelines take the queries for the last ones, as pipeline(q, k, v) does."
            )
        if Hq != Hkv and not enable_gqa:
            raise ValueError(f"'enable_gqa' must be True for {Hq} heads of queries and {Hkv} of keys")
    return pipeline(query, key, value, causal=is_causal, scale=scale)

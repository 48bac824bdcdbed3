"""Why a layer of SGLang, or a whole batch, cannot go sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from blocksparse.inputs import MAX_HEAD_DIM

# Arguments of one call of a layer that change what attention means, and the reasons that a DensityRecorder gets.
_NOT_PLAIN = {"sinks": "attention sinks", "rel_bias": "position bias"}


def layer_is_dense_because(layer: Any, *, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """The first reason why a layer is dense in every call, or None.

    Args:
        layer: SGLang's RadixAttention.
        dtype: that of the model.
        cache_dtype: that of the keys and values in the cache.
    """
    reasons = {
        "cross attention": layer.is_cross_attention,
        "not causal": layer.attn_type.value != "decoder",
        "sliding window": layer.sliding_window_size > -1,
        "chunked attention": layer.use_irope,
        "softcap": layer.logit_cap > 0,
        "position bias": layer.pos_encoding_mode != "NONE",
        "temperature by length": layer.xai_temperature_len > 0,
        f"head dim above {MAX_HEAD_DIM}": max(layer.qk_head_dim, layer.v_head_dim) > MAX_HEAD_DIM,
        f"KV cache in {str(cache_dtype).removeprefix('torch.')}": cache_dtype != dtype,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def call_is_dense_because(options: Mapping[str, Any]) -> str | None:
    """The first reason why one call of a layer is dense, or None.

    Args:
        options: all arguments that change what attention means or gives. One that is unknown here is a reason by
            its name.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            return _NOT_PLAIN.get(name, name)
    return None


def batch_is_dense_because(batch: Any, *, tokens: int) -> str | None:
    """The first reason why a ForwardBatch is dense, or None.

    Args:
        tokens: the queries that came with it.
    """
    if batch.forward_mode.name not in ("EXTEND", "MIXED"):
        return str(batch.forward_mode.name).lower().replace("_", " ")  # as "target verify", of drafts
    if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
        return "lengths that only the GPU knows"
    if batch.encoder_lens is not None:
        return "cross attention"
    if batch.cross_attention_custom_mask is not None or batch.multi_item_delimiter_indices is not None:
        return "mask"
    return "padded batch" if sum(batch.extend_seq_lens_cpu) != tokens else None

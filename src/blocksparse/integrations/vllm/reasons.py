"""Why a layer of vLLM cannot go sparse, by the arguments that vLLM makes its attention with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from blocksparse.inputs import MAX_HEAD_DIM

_KINDS = {"encoder": "not causal", "encoder_only": "not causal", "encoder_decoder": "cross attention"}
# Arguments that must be None, or 0, and the reasons that a DensityRecorder gets for others.
_NOT_PLAIN = {
    "alibi_slopes": "position bias",
    "sliding_window": "sliding window",
    "logits_soft_cap": "softcap",
    "sinks": "attention sinks",
}


def dense_because(
    *, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, attn_type: str, options: Mapping[str, Any]
) -> str | None:
    """The first reason why a layer is dense, or None.

    Args:
        dtype: that of the model. vLLM calls a cache in it "auto", or by its name.
        options: all arguments that change what attention means. One that is unknown here is a reason by its name.
    """
    if attn_type != "decoder":
        return _KINDS.get(attn_type, attn_type)
    for name, value in options.items():
        if value is not None and not (name == "logits_soft_cap" and value == 0):
            return _NOT_PLAIN.get(name, name)
    if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        return f"KV cache in {kv_cache_dtype}"
    return f"head dim above {MAX_HEAD_DIM}" if head_size > MAX_HEAD_DIM else None

"""Exact dense attention of what no pipeline runs. Its memory grows with the keys, not with their square."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.hosts.transformers.call import AttentionCall
from blocksparse.hosts.transformers.prompt_mask import PromptMask

_ONLY_EAGER = ("softcap", "s_aux", "sinks")
_BY_QUERY = ("position_bias", "s_aux", "sinks")  # `[B|1, Hq|1, M|1, N|1]`, if they have four dimensions
# Models that choose keys themselves turn their choice into a mask only for "eager" and "sdpa", not for others.
_CHOSEN_KEYS = ("indices", "block_indices")
# Eager attention has about so many logits at once, and sdpa so many entries of a mask.
LOGITS_AT_ONCE, MASK_AT_ONCE = 2**24, 2**26


def dense(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attention by sdpa or, if sdpa cannot compute it, by the model's own eager function: `[B, M, Hq, Dv]`.

    Also the weights `[B, Hq, M, N]`, if `output_attentions` asks for them. Both functions get a few queries at a
    time where they would otherwise hold a number for every pair.
    """
    kwargs, mask = call.kwargs, call.mask
    if any(kwargs.get(name) is not None for name in _CHOSEN_KEYS):
        raise ValueError(
            f"{type(call.module).__name__} selects its own keys, which cannot run while a pipeline is "
            "attached. Call detach() first."
        )
    (B, Hq, M, _), N = call.query.shape, call.key.shape[2]
    eager = call.wants_weights or any(kwargs.get(name) is not None for name in _ONLY_EAGER)
    plain = mask is None or (
        isinstance(mask, PromptMask) and mask.request is None and mask.sequences is None and mask.window is None
    )
    if plain and call.causal and M > 1:
        assert call.seen is not None  # because nothing else is known of its mask
        if not eager and kwargs.get("position_bias") is None and M != N:
            return _chunk(call, call.seen), None
        # sdpa knows a whole causal prompt by `is_causal`, and so takes no mask for it.
        mask = PromptMask((B, 1, M, N), call.seen, call.query.device) if eager or M != N else None
    attend = _eager(call) if eager else _sdpa(call)
    key, value = call.key, call.value
    if call.wants_weights or mask is None or not (eager or isinstance(mask, PromptMask)):
        out, weights = attend(
            call.query, key, value, mask.made() if isinstance(mask, PromptMask) else mask, kwargs
        )
        return out, weights if call.wants_weights else None
    by_query = {name: x for name in _BY_QUERY if isinstance(x := kwargs.get(name), Tensor) and x.ndim == 4}
    # A few queries see few keys of a window, and only those are multiplied.
    window = mask.window if isinstance(mask, PromptMask) and "position_bias" not in by_query else None
    width = N if window is None else min(N, 2 * window)
    rows = max(16, LOGITS_AT_ONCE // (B * Hq * width) if eager else MASK_AT_ONCE // (B * width))
    rows = rows if window is None else min(rows, max(16, window))
    if rows >= M and isinstance(mask, PromptMask):
        return attend(call.query, key, value, mask.made(), kwargs)[0], None
    outs = []
    for start in range(0, M, rows):
        stop, seen = min(start + rows, M), slice(None)
        if isinstance(mask, PromptMask):
            seen = seen if window is None else mask.columns(start, stop)
            part = mask.rows(start, stop, seen)
        else:
            part = _rows(mask, start, stop)
        own = kwargs | {name: _rows(x, start, stop) for name, x in by_query.items()}
        outs.append(attend(call.query[:, :, start:stop], key[:, :, seen], value[:, :, seen], part, own)[0])
    return torch.cat(outs, 1), None


_Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], tuple[Tensor, Tensor | None]]
"""A function of queries, keys and values, the mask of these and the arguments of the model."""


def _sdpa(call: AttentionCall) -> _Attend:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        kwargs = kwargs | {"is_causal": call.causal}
        output: tuple[Tensor, None] = sdpa_attention_forward(call.module, query, key, value, mask, **kwargs)
        return output

    return attend


def _eager(call: AttentionCall) -> _Attend:
    function = _eager_of(call.module)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if mask is not None and mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
        return function(call.module, query, key, value, mask, **kwargs)

    return attend


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """The rows of some queries of `x` `[B|1, Hq|1, M|1, N]`."""
    return x if x.shape[2] == 1 else x[:, :, start:stop]


def _chunk(call: AttentionCall, seen: int) -> Tensor:
    """Dense attention of the last queries of `seen` tokens, `[B, M, Hq, Dv]`; on a GPU it makes no mask."""
    out = scaled_dot_product_attention(
        call.query,
        call.key[:, :, :seen],
        call.value[:, :, :seen],
        attn_mask=causal_lower_right(call.query.shape[2], seen),
        dropout_p=call.kwargs.get("dropout") or 0.0,
        scale=call.kwargs.get("scaling"),
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that the forward of a module names for "eager": most models have one, and some have several."""
    forward: Any = inspect.unwrap(type(module).forward)
    for name in forward.__code__.co_names:
        if name.endswith("eager_attention_forward"):
            found: Callable[..., tuple[Tensor, Tensor]] = forward.__globals__[name]
            return found
    raise ValueError(
        f"{type(module).__name__} needs its own dense attention, and its forward names no "
        "eager_attention_forward. Detach the model."
    )

"""What one attention call of transformers asks for, and exact dense attention of what no pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, final
from weakref import ref

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from blocksparse.batch.sequences import Sequences
from blocksparse.hosts.transformers.own_function import BY_QUERY, ONLY_EAGER, SINKS, eager_of
from blocksparse.hosts.transformers.prompt_mask import PromptMask, as_numbers
from blocksparse.inputs import MAX_HEAD_DIM
from blocksparse.launch.torch_modes import is_checkpointed
from blocksparse.launch.torch_private import under_a_function_mode
from blocksparse.spec import AttentionOptions


@final
@define(eq=False)
class LastLengths:
    """Makes `Sequences` of `cu_seq_lens_q` and `cu_seq_lens_k`, and keeps them for the later layers of the pass.

    transformers gives every layer the same two tensors. To read one, the host waits for a GPU. What is written
    into a tensor between two passes does not always change its version, above all not in `torch.inference_mode`.
    So a layer that does not come after the last one belongs to another pass, for which both are read again.
    """

    _last: tuple[int, list[tuple[ref[Tensor], int]], Sequences] | None = field(default=None, init=False)

    def of(self, layer: int, *ends: Tensor) -> Sequences:
        """The sequences that end there, in the queries and, if two tensors are given, in the keys."""
        last = self._last  # read once: other threads may replace it
        if last is not None and last[0] < layer and same(last[1], ends):
            sequences = last[2]
        else:
            sequences = Sequences.from_cu_seqlens(*ends)
        self._last = layer, [(ref(x), version(x)) for x in ends], sequences
        return sequences


def same(known: list[tuple[ref[Tensor], int]], ends: tuple[Tensor, ...]) -> bool:
    """Whether these are the very tensors, unchanged. Weak references are compared by what their tensors hold."""
    return len(known) == len(ends) and all(
        at() is x and before == version(x) for (at, before), x in zip(known, ends, strict=True)
    )


def version(x: Tensor) -> int:
    """A number that changes when an op writes to the tensor; inference tensors have none."""
    return 0 if x.is_inference() else x._version


# Arguments with which attention must be dense, and the reasons that a DensityRecorder gets for them.
_NOT_PLAIN = {
    "position_bias": "position bias",
    "cache": "paged cache",
    "indices": "chosen keys",
    "block_indices": "chosen keys",
}


def layer_of(module: nn.Module) -> int:
    """transformers' index of the layer to which a module belongs, or -1."""
    layer = getattr(module, "layer_idx", None)
    return -1 if layer is None else int(layer)


@final
@define(eq=False)  # torch.compile cannot create frozen instances
class AttentionCall:
    """One call of attention by a model."""

    module: nn.Module
    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    mask: Tensor | PromptMask | None  # [B|1, Hq|1, M, N] bool, or numbers that are added to the logits
    causal: bool  # whether the queries are the last of `seen` tokens, in each of the mask's `sequences`
    seen: int | None  # how many keys the last query sees, if the mask does not say anything else
    kwargs: dict[str, Any]  # all other arguments of the model

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | PromptMask | None,
        kwargs: dict[str, Any],
        lengths: LastLengths,
        *,
        eager: bool = False,
    ) -> AttentionCall:
        """The call that a model makes. If its attention was `eager`, no mask means that all keys are seen."""
        B, M, N = query.shape[0], query.shape[2], key.shape[2]
        if isinstance(mask, PromptMask):
            if mask.shape[2:] != (M, N):
                raise ValueError(
                    f"{type(module).__name__} got {M} queries and {N} keys, and a mask of {mask.shape[2]} queries "
                    f"and {mask.shape[3]} keys. A model that adds its own keys cannot run while a pipeline is "
                    "attached. Call detach() first."
                )
            if mask.request is None:
                # The mask of a window, say, which does not know of prompts that only these arguments tell apart.
                if mask.sequences is None and M > 1:
                    packed = _packed(layer_of(module), kwargs, query, lengths)
                    if packed is not None:
                        packed.check_fits(B, M, mask.seen, causal=True)
                        mask = evolve(mask, sequences=packed, tensor=None)
                return cls(module, query, key, value, mask, True, mask.seen, kwargs)
        options = kwargs.get("is_causal")
        # transformers' sdpa takes a module that says nothing for causal; but encoders are among them.
        causal = bool(getattr(module, "is_causal", False) if options is None else options)
        if mask is not None:
            return cls(module, query, key, value, mask, causal, None, kwargs)
        if eager:  # whose masks are never left out, and which does not know `is_causal`
            return cls(module, query, key, value, None, False, N, kwargs)
        if causal and 1 < M != N:
            raise ValueError(
                f"{type(module).__name__} got {M} queries, {N} keys and no mask, so the positions of the queries "
                "are unknown. Attach to the whole model, which makes the masks of its parts. A model that adds "
                "its own keys cannot run while a pipeline is attached."
            )
        if causal and M > 1 and (packed := _packed(layer_of(module), kwargs, query, lengths)) is not None:
            mask = PromptMask((B, 1, M, N), N, query.device, packed)
        return cls(module, query, key, value, mask, causal, N, kwargs)

    @property
    def layer(self) -> int:
        return layer_of(self.module)

    @property
    def end(self) -> int:
        """The position after the last query's, where keys were dropped that a window hides."""
        return self.dropped + (self.key.shape[2] if self.seen is None else self.seen)

    @property
    def dropped(self) -> int:
        """How many tokens a cache has dropped before the first key, because a window hides them."""
        return self.mask.dropped if isinstance(self.mask, PromptMask) else 0

    @property
    def sequences(self) -> Sequences | None:
        return self.mask.sequences if isinstance(self.mask, PromptMask) else None

    @property
    def window(self) -> int | None:
        """The window in tokens, if the mask hides nothing but other prompts and keys outside a window."""
        return self.mask.window if isinstance(self.mask, PromptMask) else None

    def options(self) -> AttentionOptions:
        """The options of the layer, as arguments of a pipeline."""
        kwargs = self.kwargs
        # Written as a dict, since torch.compile cannot call a TypedDict some of whose keys may be left out.
        return {
            "scale": kwargs.get("scaling"),
            "window": self.window,
            "softcap": kwargs.get("softcap"),
            "sinks": _sinks_in(kwargs),
        }

    @property
    def wants_weights(self) -> bool:
        """Whether somebody asks for weights: in the call, in the config, or of a model that keeps it to itself."""
        if (options := self.kwargs.get("output_attentions")) is not None:
            return bool(options)
        if getattr(getattr(self.module, "config", None), "output_attentions", False):
            return True
        if torch.compiler.is_compiling() and not _active_collector.compiling:
            return False
        return any(name.endswith("attentions") for name in _active_collector.get() or ())

    def dense_because(self) -> str | None:
        """The first reason why all of this call must be dense, whatever its layer and its lengths, or None."""
        window = self.kwargs.get("sliding_window")
        if self.query.shape[2] == 1:
            return "decode"
        if not self.causal:
            return "not causal"
        if because := next((why for name, why in _NOT_PLAIN.items() if self.kwargs.get(name) is not None), None):
            return because
        if because := unread_because(self.kwargs, self.query.shape[1]):
            return because
        if self.wants_weights:
            return "output_attentions"
        if self.kwargs.get("dropout"):
            return "dropout"
        if torch.is_grad_enabled() or is_checkpointed():  # what is trained may stand behind the model
            return "gradients"
        if self.module.training:
            return "training"
        # There PyTorch puts a function in its place, which knows the tokens of the other ranks.
        if str(torch.nn.functional.scaled_dot_product_attention.__module__).startswith("torch.distributed"):
            return "context parallel"
        if not torch.compiler.is_compiling() and under_a_function_mode():  # which may put in another one
            return "function mode"
        if self.seen is None and not torch.compiler.is_compiling():
            return "mask"  # which counts, whatever window the layer has
        if window is not None and window != self.window and self._longest() > window:
            return "sliding window"
        if self.seen is None:
            return "mask"
        packed = self.kwargs.get("cu_seq_lens_q") is not None and self.sequences is None
        if packed and (self.query.shape[0] > 1 or torch.compiler.is_compiling()):
            return "packed batch"
        if isinstance(self.kwargs.get("scaling"), Tensor):
            return "a tensor as the scale"
        if max(self.query.shape[3], self.value.shape[3]) > MAX_HEAD_DIM:
            return f"head dim above {MAX_HEAD_DIM}"
        return None

    def _longest(self) -> int:
        """The keys of the longest prompt."""
        if self.sequences is not None:
            return max((span.keys for span in self.sequences.spans), default=0)
        return self.key.shape[2] if self.seen is None else self.seen


def _packed(layer: int, kwargs: dict[str, Any], query: Tensor, lengths: LastLengths) -> Sequences | None:
    """The prompts that FlashAttention's arguments describe, if they are several in one entry of the batch."""
    ends = [kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if kwargs.get(name) is not None]
    if not ends or kwargs.get("cache") is not None or query.shape[0] > 1 or torch.compiler.is_compiling():
        return None
    sequences = lengths.of(layer, *ends)
    return sequences if len(sequences.spans) > 1 else None


def _sinks_in(kwargs: Mapping[str, Any]) -> Any:
    """The attention sinks that a model passes, or None."""
    return next((kwargs[name] for name in SINKS if kwargs.get(name) is not None), None)


def unread_because(kwargs: Mapping[str, Any], q_heads: int) -> str | None:
    """The reason why these arguments cannot be read for so many query heads, or None."""
    softcap, sinks = kwargs.get("softcap"), _sinks_in(kwargs)
    compiling = torch.compiler.is_compiling()  # to read a tensor would break the graph
    if softcap is not None and (compiling or not isinstance(softcap, Real)):
        return "softcap"
    if sinks is not None and (compiling or not isinstance(sinks, Tensor) or sinks.shape != (q_heads,)):
        return "attention sinks"
    return None


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
    eager = call.wants_weights or any(kwargs.get(name) is not None for name in ONLY_EAGER)
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
    by_query = {name: x for name in BY_QUERY if isinstance(x := kwargs.get(name), Tensor) and x.ndim == 4}
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
    if (function := eager_of(type(call.module))) is None:
        raise ValueError(
            f"{type(call.module).__name__} needs its own dense attention, and its forward names no "
            "eager_attention_forward. Detach the model."
        )

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if mask is not None and mask.dtype == torch.bool:
            mask = as_numbers(mask, query.dtype)
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

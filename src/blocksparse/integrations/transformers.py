"""Sparse prefill inside Hugging Face transformers (5.16 or later): `attach(model, pbs_attn())`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, final
from uuid import uuid4

import torch
from attrs import Factory, define, field, frozen, validators
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from blocksparse.head_groups import HeadGroups
from blocksparse.inputs import check_inputs
from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.opaque_call import OpaqueCall
from blocksparse.opaque_call import attend as attend_opaquely
from blocksparse.pipeline import Pipeline
from blocksparse.schedule import LayerPipeline, Schedule

_PREFIX = "blocksparse-"
_REMEMBERED = 64
# Arguments that change what attention computes, and their names in a DensityRecorder.
_NOT_PLAIN = {
    "softcap": "softcap",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "position bias",
    "cu_seq_lens_q": "packed batch",
    "cache": "paged cache",
    "indices": "chosen keys",
    "block_indices": "chosen keys",
}
_ONLY_EAGER = ("softcap", "s_aux", "sinks")
# Models that select keys themselves turn their choice into a mask for "eager" and "sdpa" only.
_CHOSEN_KEYS = ("indices", "block_indices")


def attach(
    model: PreTrainedModel,
    pipeline: LayerPipeline | Schedule,
    *,
    min_tokens: int = 512,
    min_queries: int = 64,
    recorder: DensityRecorder | None = None,
) -> Attachment:
    """Run the prefill of `model` through `pipeline`, and everything else through exact dense attention.

    Lasts until `detach()`, or for a block:

        with attach(model, pbs_attn()):
            model.generate(...)

    Args:
        pipeline: for every layer; or a `Schedule`, which chooses by `layer_idx`.
        min_tokens: attention over fewer tokens than this, context and queries together, stays dense.
        min_queries: so does attention of fewer queries at once (decoding always does).
        recorder: is told what each call did; without one nothing is recorded.

    Raises:
        TypeError: `model` is not a transformers model, or `pipeline` is none.
        ValueError: the model cannot change its attention function, or has no layer that the schedule names.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"'model' must be a transformers.PreTrainedModel: {type(model).__name__}; "
            "take the model out of its wrapper"
        )
    if not isinstance(pipeline, Pipeline | HeadGroups | Schedule):
        raise TypeError(
            f"'pipeline' must be a Pipeline, HeadGroups or a Schedule: {type(pipeline).__name__}; "
            "Schedule(None, layers={...}) attends sparsely in single layers"
        )
    schedule = pipeline if isinstance(pipeline, Schedule) else Schedule(pipeline)
    if recorder is not None and not isinstance(recorder, DensityRecorder):
        raise TypeError(f"'recorder' must be a DensityRecorder: {type(recorder).__name__}")
    layers = {
        layer: pipeline if pipeline is None or recorder is None else _Recorded(pipeline, layer, recorder)
        for layer, pipeline in _layers_of(schedule, model).items()
    }
    adapter = _Adapter(layers, min_tokens, min_queries, recorder)
    attachment = Attachment(
        _PREFIX + uuid4().hex, tuple((config, config._attn_implementation) for config in _configs(model))
    )
    refused = ValueError(
        f"{type(model).__name__} cannot change its attention function: it does not support transformers' "
        "AttentionInterface; call the pipeline yourself, in place of the model's attention"
    )
    if not model.is_backend_compatible():
        raise refused
    AttentionInterface.register(attachment.key, adapter.attend)
    AttentionMaskInterface.register(attachment.key, adapter.mask)
    try:
        model.set_attn_implementation(attachment.key)
        if model.config._attn_implementation != attachment.key:
            raise refused
    except BaseException:
        attachment.detach()
        raise
    return attachment


@final
@frozen(eq=False)
class Attachment:
    """A pipeline in a model, under a name of its own in transformers' registries, until `detach()`.

    Attachments of one model stack: the last one works, and they are detached in reverse order.
    """

    key: str
    _before: tuple[tuple[Any, str | None], ...] = field(repr=False)  # every config, and what it named

    def detach(self) -> None:
        """Give the model its previous attention back and forget the name. Doing it twice does nothing.

        A config that was set to something else in the meantime is left as it is.

        Raises:
            RuntimeError: a later attachment to the same model is still in place.
        """
        if self.key not in AttentionInterface._global_mapping:
            return
        for config, _ in self._before:
            if (current := config._attn_implementation or "") != self.key and current.startswith(_PREFIX):
                raise RuntimeError(f"{self.key} lies below a later attachment: detach that one ({current}) first")
        for config, before in self._before:
            if config._attn_implementation == self.key:
                config._attn_implementation_internal = before  # the public setter would also set sub-configs
        # transformers registers class-wide but deletes per instance only.
        AttentionInterface._global_mapping.pop(self.key)
        AttentionMaskInterface._global_mapping.pop(self.key)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


@final
@frozen(eq=False)
class _Adapter:
    """The two functions that transformers calls: one makes masks, the other attends."""

    layers: Mapping[int, LayerPipeline | _Recorded | None]  # by `layer_idx`, -1 for attention without one
    min_tokens: int = field(validator=[validators.instance_of(int), validators.gt(0)])
    min_queries: int = field(validator=[validators.instance_of(int), validators.gt(0)])
    recorder: DensityRecorder | None
    # How many keys the last query sees, by (queries, keys); transformers tells the mask function only. Never
    # stale: attention gets no mask only where this forward pass has just asked for one of these lengths.
    seen: dict[tuple[int, int], int] = field(factory=dict, init=False)

    def mask(self, **request: Any) -> Tensor | None:
        """None where `seen` says it all, so that a chunk needs no mask of its own; else what sdpa gets."""
        seen = _plain_causal(**request)
        if seen is None:
            mask: Tensor | None = sdpa_mask(**request)
            return mask
        lengths = request["q_length"], request["kv_length"]
        if lengths[0] != lengths[1]:
            self.seen.pop(lengths, None)
            self.seen[lengths] = seen
            if len(self.seen) > _REMEMBERED:
                self.seen.pop(next(iter(self.seen)))
        return None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend `query` `[B, Hq, M, D]` to `key` `[B, Hkv, N, D]` and `value` `[B, Hkv, N, Dv]`.

        Gives `[B, M, Hq, Dv]`, contiguous, and the weights `[B, Hq, M, N]` if `output_attentions` asks for them.
        """
        M, N = query.shape[2], key.shape[2]
        seen = (N if M == N else self.seen.get((M, N))) if attention_mask is None else None
        call = _Call(module, query, key, value, attention_mask, seen, kwargs)
        pipeline = self.layers[call.layer]
        if reason := call.dense_because(pipeline is not None, self.min_tokens, self.min_queries):
            # A compiled decode step is recorded when it is traced at most, so it is not recorded at all.
            if self.recorder is not None and not torch.compiler.is_compiling():
                self.recorder.saw_dense(call.layer, reason)
            return call.dense()
        assert pipeline is not None  # else there is a reason
        out = pipeline(query, key[:, :, :seen], value[:, :, :seen], scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None


@final
@frozen(eq=False)
class _Recorded:
    """What attends in one layer, and is told of."""

    pipeline: LayerPipeline
    layer: int
    recorder: DensityRecorder
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
        scale = check_inputs(q, k, v, causal=True, scale=scale)
        return attend_opaquely(self._call, q, k, v, causal=True, scale=scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        trace = self.pipeline.trace(q, k, v, causal=causal, scale=scale)
        self.recorder.saw_sparse(self.layer, trace.density(), q_len=q.shape[2], k_len=k.shape[2])
        return trace.output.out


@final
@define(eq=False)  # torch.compile cannot make frozen ones
class _Call:
    """One call of attention: whether it must be dense, and how."""

    module: nn.Module
    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    mask: Tensor | None  # [B|1, Hq|1, M, N] bool, or added to the logits
    seen: int | None  # without a mask: how many keys the last query sees, if known
    kwargs: dict[str, Any]  # what else the model passes

    @property
    def layer(self) -> int:
        return _layer_of(self.module)

    @property
    def causal(self) -> bool:
        if (asked := self.kwargs.get("is_causal")) is not None:
            return bool(asked)
        return bool(getattr(self.module, "is_causal", True))

    @property
    def wants_weights(self) -> bool:
        if (asked := self.kwargs.get("output_attentions")) is not None:
            return bool(asked)
        return bool(getattr(getattr(self.module, "config", None), "output_attentions", False))

    def dense_because(self, pipeline: bool, min_tokens: int, min_queries: int) -> str | None:
        """The first reason against attending sparsely, or None; `pipeline` is whether the layer has one."""
        queries, window = self.query.shape[2], self.kwargs.get("sliding_window")
        if queries == 1:
            return "decode"
        if not self.causal:
            return "not causal"
        if not pipeline:
            return "no pipeline for this layer"
        if because := next((why for name, why in _NOT_PLAIN.items() if self.kwargs.get(name) is not None), None):
            return because
        if self.wants_weights:
            return "output_attentions"
        if self.kwargs.get("dropout"):
            return "dropout"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value)):
            return "gradients"
        if window is not None and (self.key.shape[2] if self.seen is None else self.seen) > window:
            return "sliding window"
        if self.mask is not None:
            return "mask"
        if self.seen is None:
            return "unknown offset"
        if self.seen < min_tokens:
            return "fewer than min_tokens"
        return "fewer than min_queries" if queries < min_queries else None

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Exact attention: by the model's own function where sdpa cannot compute it, else by sdpa.

        Raises:
            ValueError: the model chooses keys by itself, or its own function is needed and not found.
        """
        kwargs, mask = self.kwargs, self.mask
        if any(kwargs.get(name) is not None for name in _CHOSEN_KEYS):
            raise ValueError(f"{type(self.module).__name__} chooses keys by itself: detach the model to run it")
        M, N = self.query.shape[2], self.key.shape[2]
        eager = self.wants_weights or any(kwargs.get(name) is not None for name in _ONLY_EAGER)
        if mask is None and self.causal and M > 1:
            seen = M if self.seen is None else self.seen  # transformers means the first M keys unless told more
            if eager or (seen > M and kwargs.get("position_bias") is not None):
                mask = self.query.new_ones((1, 1, M, N), dtype=torch.bool).tril(seen - M)
            elif seen > M:
                return self._dense_chunk(seen), None
        if not eager:
            output: tuple[Tensor, None] = sdpa_attention_forward(
                self.module, self.query, self.key, self.value, mask, **kwargs
            )
            return output
        if mask is not None and mask.dtype == torch.bool:
            lowest = torch.finfo(self.query.dtype).min
            mask = torch.zeros_like(mask, dtype=self.query.dtype).masked_fill(~mask, lowest)
        out, weights = _eager_of(self.module)(self.module, self.query, self.key, self.value, mask, **kwargs)
        return out, weights if self.wants_weights else None

    def _dense_chunk(self, seen: int) -> Tensor:
        """Attention of the last queries of `seen` tokens, `[B, M, Hq, Dv]`; on a GPU no mask is made for it."""
        out = scaled_dot_product_attention(
            self.query,
            self.key[:, :, :seen],
            self.value[:, :, :seen],
            attn_mask=causal_lower_right(self.query.shape[2], seen),
            dropout_p=self.kwargs.get("dropout") or 0.0,
            scale=self.kwargs.get("scaling"),
            enable_gqa=self.query.shape[1] != self.key.shape[1],
        )
        return out.transpose(1, 2).contiguous()


def _plain_causal(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> int | None:
    """How many keys the last query sees if each query sees every key up to its own, and nothing is padded.

    None for every other request: packed, overlaid (`allow_is_causal_skip` is False for these), windowed, padded.
    `attention_mask` is `[B, N]`.
    """
    if not allow_is_causal_skip or q_length == 1 or kv_offset != 0:
        return None
    if torch.compiler.is_compiling() and (attention_mask is not None or isinstance(q_offset, Tensor)):
        return None  # reading a tensor would break the graph
    seen = int(q_offset) + q_length
    if seen > kv_length or (local_size is not None and seen > local_size):
        return None
    if attention_mask is not None and (attention_mask.shape[-1] < seen or not attention_mask[:, :seen].all()):
        return None
    return seen


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `eager_attention_forward` that stands beside the attention class, or beside a class it derives from."""
    for owner in type(module).__mro__:
        if eager := getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None):
            found: Callable[..., tuple[Tensor, Tensor]] = eager
            return found
    raise ValueError(
        f"{type(module).__name__} needs its own dense attention, and {type(module).__module__} has no "
        "eager_attention_forward: detach the model"
    )


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Every config that names an attention function: of the model, of its parts, and what these hold."""
    found: set[int] = set()
    waiting = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if id(config) in found:
            continue
        found.add(id(config))
        yield config
        held = (getattr(config, name, None) for name in config.sub_configs)
        waiting.extend(sub for sub in held if sub is not None)


def _layers_of(schedule: Schedule, model: PreTrainedModel) -> dict[int, LayerPipeline | None]:
    """What attends in every layer that some module of the model stands in, and in none (-1)."""
    layers: dict[int, LayerPipeline | None] = {}
    layers.update(dict.fromkeys((-1, *map(_layer_of, model.modules())), schedule.default))
    if schedule.layers or schedule.dense:
        config = model.config
        count: int | None = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        if count is None:
            raise ValueError(
                f"to name layers their number must be known: {type(config).__name__} has no num_hidden_layers"
            )
        layers.update(enumerate(schedule.resolve(count)))
    return layers


def _layer_of(module: nn.Module) -> int:
    """transformers' index of the layer that a module stands in, or -1."""
    layer = getattr(module, "layer_idx", None)
    return -1 if layer is None else int(layer)

"""Sparse prefill inside Hugging Face transformers (5.16 or later): `attach(model, pbs_attn())`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from attrs import Factory, define, field, frozen
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blocksparse.audit.audit import Audit
from blocksparse.audit.audited_pipeline import AuditedPipeline
from blocksparse.head_groups import HeadGroups
from blocksparse.inputs import check_inputs
from blocksparse.integrations.attachment import Attachment as Attachment
from blocksparse.integrations.chunk_mask import ChunkMask
from blocksparse.integrations.density_recorder import DensityRecorder as DensityRecorder
from blocksparse.opaque_call import OpaqueCall
from blocksparse.opaque_call import attend as attend_opaquely
from blocksparse.pipeline import Pipeline
from blocksparse.schedule import LayerPipeline, Schedule
from blocksparse.validators import size, whole

# Arguments with which attention must be dense, and the reasons that a DensityRecorder gets for them.
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
# Models that choose keys themselves turn their choice into a mask only for "eager" and "sdpa", not for others.
_CHOSEN_KEYS = ("indices", "block_indices")


def attach(
    model: PreTrainedModel,
    pipeline: LayerPipeline | Schedule,
    *,
    min_tokens: int = 512,
    min_queries: int = 64,
    recorder: DensityRecorder | None = None,
    audit: Audit | None = None,
) -> Attachment:
    """Run the prefill of `model` through `pipeline`, and everything else through exact dense attention.

    This lasts until `detach()` is called, or for a `with` block:

        with attach(model, pbs_attn()):
            model.generate(...)

    Args:
        pipeline: what attends in every layer; or a `Schedule`, which chooses by `layer_idx`.
        min_tokens: attention over fewer tokens than this, context and queries together, stays dense.
        min_queries: attention with fewer queries at once stays dense. Decoding always does.
        recorder: gets a record of what each call did; if None, nothing is recorded.
        audit: compares a few random queries of some sparse calls with dense attention; None for no audit.

    Raises:
        TypeError: `model` is not a transformers model, or `pipeline` is not a pipeline.
        ValueError: the model cannot change its attention function, or lacks a layer that the schedule names.
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
    if audit is not None and not isinstance(audit, Audit):
        raise TypeError(f"'audit' must be an Audit: {type(audit).__name__}")
    layers = {
        layer: None if pipeline is None else _watched(pipeline, layer, recorder, audit)
        for layer, pipeline in _layers_of(schedule, model).items()
    }
    adapter = _Adapter(layers, frozenset(map(id, model.modules())), min_tokens, min_queries, recorder)
    configs = tuple(_configs(model))
    _refuse_shared(configs, adapter.modules, model)
    return Attachment.of(model, configs, attend=adapter.attend, mask=adapter.mask)


@final
@frozen(eq=False)
class _Adapter:
    """The two functions that transformers calls: one makes masks, the other attends."""

    # By `layer_idx`, -1 for attention without one.
    layers: Mapping[int, LayerPipeline | AuditedPipeline | _Recorded | None]
    modules: frozenset[int]  # ids of the model's modules, because another model may share a config and call this
    min_tokens: int = field(converter=whole, validator=size)
    min_queries: int = field(converter=whole, validator=size)
    recorder: DensityRecorder | None

    def mask(self, **request: Any) -> Tensor | ChunkMask | None:
        """None for a whole plain causal prompt, a `ChunkMask` for the end of one, else the mask that sdpa gets."""
        if isinstance(request.get("attention_mask"), ChunkMask):
            request["attention_mask"] = None  # `generate` got it from this function, so no token is padding
        seen = _plain_causal(**request)
        if seen is None:
            mask: Tensor | None = sdpa_mask(**request)
            return mask
        B, M, N = request["batch_size"], request["q_length"], request["kv_length"]
        return None if M == N else ChunkMask((B, 1, M, N), seen, request["device"])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | ChunkMask | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend `query` `[B, Hq, M, D]` to `key` `[B, Hkv, N, D]` and `value` `[B, Hkv, N, Dv]`.

        Returns `[B, M, Hq, Dv]`, contiguous, and the weights `[B, Hq, M, N]` if `output_attentions` asks for them.
        """
        call = _Call.of(module, query, key, value, attention_mask, kwargs)
        own = id(module) in self.modules
        pipeline = self.layers[call.layer] if own else None
        if reason := call.dense_because(pipeline is not None, self.min_tokens, self.min_queries):
            # Inside torch.compile this line would run only when the graph is traced, so nothing is recorded there.
            if own and self.recorder is not None and not torch.compiler.is_compiling():
                self.recorder.saw_dense(call.layer, reason)
            return call.dense()
        assert pipeline is not None  # or there would be a reason
        seen = call.seen
        out = pipeline(query, key[:, :, :seen], value[:, :, :seen], scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None


@final
@frozen(eq=False)
class _Recorded:
    """A pipeline of one layer that records its calls."""

    pipeline: LayerPipeline | AuditedPipeline
    layer: int
    recorder: DensityRecorder
    _call: OpaqueCall = field(
        init=False, repr=False, default=Factory(lambda self: OpaqueCall(self._attend), takes_self=True)
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
        q, k, v, scale = check_inputs(q, k, v, causal=True, scale=scale)
        return attend_opaquely(self._call, q, k, v, causal=True, scale=scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        trace = self.pipeline.trace(q, k, v, causal=causal, scale=scale)
        self.recorder.saw_sparse(self.layer, trace.density(), q_len=q.shape[2], k_len=k.shape[2])
        return trace.output.out


def _watched(
    pipeline: LayerPipeline, layer: int, recorder: DensityRecorder | None, audit: Audit | None
) -> LayerPipeline | AuditedPipeline | _Recorded:
    """The pipeline of one layer with the audit and the record that were asked for."""
    audited = pipeline if audit is None else AuditedPipeline(pipeline, layer, audit)
    return audited if recorder is None else _Recorded(audited, layer, recorder)


@final
@define(eq=False)  # torch.compile cannot create frozen instances
class _Call:
    """One call of attention by a model: why it must be dense, and how it is computed densely."""

    module: nn.Module
    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    mask: Tensor | None  # [B|1, Hq|1, M, N] bool, or numbers that are added to the logits
    causal: bool  # if there is no mask: whether the queries are the last of `seen` tokens
    seen: int | None  # if there is no mask: how many keys the last query sees
    kwargs: dict[str, Any]  # all other arguments of the model

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | ChunkMask | None,
        kwargs: dict[str, Any],
    ) -> _Call:
        M, N = query.shape[2], key.shape[2]
        if isinstance(mask, ChunkMask):
            if mask.shape[2:] == (M, N):
                return cls(module, query, key, value, None, True, mask.seen, kwargs)
            mask = mask.made()
        asked = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
        if mask is None and causal and 1 < M != N:
            raise ValueError(
                f"{type(module).__name__} got {M} queries, {N} keys and no mask, and nothing says where the "
                "queries stand: attach to the whole model, which makes the masks of its parts"
            )
        return cls(module, query, key, value, mask, causal, None if mask is not None else N, kwargs)

    @property
    def layer(self) -> int:
        return _layer_of(self.module)

    @property
    def wants_weights(self) -> bool:
        if (asked := self.kwargs.get("output_attentions")) is not None:
            return bool(asked)
        return bool(getattr(getattr(self.module, "config", None), "output_attentions", False))

    def dense_because(self, pipeline: bool, min_tokens: int, min_queries: int) -> str | None:
        """The first reason why this call must be dense, or None; `pipeline` says whether the layer has one."""
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
        if self.mask is not None or self.seen is None:
            return "mask"
        if self.seen < min_tokens:
            return "fewer than min_tokens"
        return "fewer than min_queries" if queries < min_queries else None

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Exact attention by sdpa or, if sdpa cannot compute it, by the model's own eager function.

        Raises:
            ValueError: the model chooses keys by itself, or its own function is needed and not found.
        """
        kwargs, mask = self.kwargs, self.mask
        if any(kwargs.get(name) is not None for name in _CHOSEN_KEYS):
            raise ValueError(
                f"{type(self.module).__name__} selects its own keys, which cannot run while a pipeline is "
                "attached: call detach() first"
            )
        M, N = self.query.shape[2], self.key.shape[2]
        eager = self.wants_weights or any(kwargs.get(name) is not None for name in _ONLY_EAGER)
        if mask is None and self.causal and M > 1:
            assert self.seen is not None  # because there is no mask
            if eager or (M != N and kwargs.get("position_bias") is not None):
                mask = self.query.new_ones((1, 1, M, N), dtype=torch.bool).tril(self.seen - M)
            elif M != N:
                return self._dense_chunk(self.seen), None
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
        """Dense attention of the last queries of `seen` tokens, `[B, M, Hq, Dv]`; on a GPU it makes no mask."""
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
    """How many keys the last query sees, if the request is for a plain causal mask without padding.

    It is None for every other request: for packed prompts and for masks that are combined with others
    (`allow_is_causal_skip` is False for both), for windows and for padding. `attention_mask` is `[B, N]`.
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
    """`eager_attention_forward` of the module that defines the attention class, or one of its base classes."""
    for owner in type(module).__mro__:
        if eager := getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None):
            found: Callable[..., tuple[Tensor, Tensor]] = eager
            return found
    raise ValueError(
        f"{type(module).__name__} needs its own dense attention, and {type(module).__module__} has no "
        "eager_attention_forward: detach the model"
    )


def _refuse_shared(configs: Iterable[Any], modules: frozenset[int], model: PreTrainedModel) -> None:
    """Refuse to attach if another model shares a config and has a pipeline: one config names one pipeline."""
    for config in configs:
        below = AttentionInterface._global_mapping.get(config._attn_implementation)
        adapter = getattr(below, "__self__", None)
        if isinstance(adapter, _Adapter) and modules.isdisjoint(adapter.modules):
            raise ValueError(
                f"{type(model).__name__} shares its {type(config).__name__} with another model that has a "
                "pipeline: give each model a config of its own, copy.deepcopy(config)"
            )


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    """Every config that names an attention function: those of the model and its parts, and their sub-configs."""
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
    """What attends in every layer of the model, by `layer_idx`, and in modules without a layer (-1)."""
    layers: dict[int, LayerPipeline | None] = {}
    layers.update(dict.fromkeys((-1, *map(_layer_of, model.modules())), schedule.default))
    if schedule.layers or schedule.dense:
        config = model.config
        count: int | None = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        if count is None:
            raise ValueError(
                "a Schedule that names layers needs their number, and "
                f"{type(config).__name__} has no num_hidden_layers"
            )
        layers.update(enumerate(schedule.resolve(count)))
    return layers


def _layer_of(module: nn.Module) -> int:
    """transformers' index of the layer to which a module belongs, or -1."""
    layer = getattr(module, "layer_idx", None)
    return -1 if layer is None else int(layer)

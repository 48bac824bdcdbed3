"""The function that transformers calls instead of its attention, with continuous batching too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, cast, final

import torch
import transformers
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.hosts.transformers.call import AttentionCall, LastLengths, layer_of
from blocksparse.hosts.transformers.dense import dense
from blocksparse.hosts.transformers.layer import LayerAttention, Outcomes
from blocksparse.hosts.transformers.mask_request import mask_of
from blocksparse.hosts.transformers.prompt_mask import KnownPrompt, PromptMask, going_on
from blocksparse.launch.torch_modes import refuse_tracing


@final
@frozen(eq=False)
class TransformersAdapter:
    """The attention function that an attached model calls."""

    layers: Mapping[int, LayerAttention]  # by `layer_idx`, -1 for attention without one
    modules: frozenset[int]  # ids of the model's modules, because another model may share a config and call this
    eager: frozenset[int]  # ids of those modules that attended by their own functions before
    outcomes: Outcomes
    lengths: LastLengths = field(factory=LastLengths, init=False)
    prompt: KnownPrompt = field(factory=KnownPrompt, init=False)
    _tell_traced: Callable[[str], bool] = field(init=False)

    @_tell_traced.default
    def _to_outcomes(self) -> Callable[[str], bool]:
        outcomes = self.outcomes

        def told(reason: str) -> bool:
            outcomes.traced_dense(reason)
            return True

        run_when_traced: Callable[[str], bool] = cast(Any, torch.compiler).assume_constant_result(told)
        return run_when_traced

    def mask(self, **request: Any) -> Tensor | PromptMask | None:
        """None where all keys are seen; in place of any other mask a `PromptMask`."""
        refuse_tracing()
        return mask_of(**request)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | PromptMask | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend `query` `[B, Hq, M, D]` to `key` `[B, Hkv, N, D]` and `value` `[B, Hkv, N, Dv]`.

        Returns `[B, M, Hq, Dv]`, contiguous, and the weights `[B, Hq, M, N]` if `output_attentions` asks for them.
        """
        call = AttentionCall.of(
            module, query, key, value, attention_mask, kwargs, self.lengths, eager=id(module) in self.eager
        )
        if id(module) not in self.modules:
            return dense(call)
        layer, seen, reason = self.layers[call.layer], call.seen, call.dense_because()
        asked = call.options()
        if reason is None:
            assert seen is not None  # or there would be a reason
            # With a window, a softcap or sinks the layer itself attends densely, where it does: transformers'
            # functions would take a mask, or hold logits.
            more = asked.get("window"), asked.get("softcap"), asked.get("sinks")
            if call.sequences is None and all(x is None for x in more):
                reason = layer.dense_because(query.shape[2], seen, None)
        if reason is not None:
            # Inside torch.compile this line runs only when the graph is traced, so no calls are counted there.
            if torch.compiler.is_compiling():
                self._tell_traced(reason)
            else:
                self.outcomes.saw_dense(call.layer, reason)
            return dense(call)
        sequences, remaining = call.sequences, 0
        if not torch.compiler.is_compiling():  # a graph would keep the length of one prompt
            remaining = self.prompt.after(call.end)
        if remaining and sequences is not None:
            sequences = going_on(sequences, remaining)
        elif remaining:
            asked["remaining"] = remaining
        out = layer(query, key[:, :, :seen], value[:, :, :seen], sequences, dropped=call.dropped, **asked)
        return out.transpose(1, 2).contiguous(), None


SDPA = "sdpa"


@final
@define(eq=False)
class SdpaInPlace:
    """Stands in for transformers' function of the name "sdpa", and hands to an adapter the calls of its model.

    Continuous batching refuses every name that it does not know, so an attachment cannot have its own there. Calls
    of other models, and calls without a paged cache, go to the function that had the name before.
    """

    adapter: TransformersAdapter | None  # None when the attachment has ended
    before: Callable[..., Any]

    @classmethod
    def put(cls, adapter: TransformersAdapter) -> SdpaInPlace:
        """Take the name."""
        if "cache" not in signature(sdpa_attention_forward).parameters:
            raise ValueError(
                f"continuous batching needs transformers 5.23 or later: {transformers.__version__}. Before, "
                "its calls do not come to the function of the name sdpa."
            )
        self = cls(adapter, AttentionInterface._global_mapping[SDPA])
        AttentionInterface.register(SDPA, self)
        return self

    def end(self) -> None:
        """Give the name back, unless another attachment has taken it since; that one then gives it back."""
        self.adapter = None
        top = AttentionInterface._global_mapping[SDPA]
        while isinstance(top, SdpaInPlace) and top.adapter is None:
            top = top.before
        AttentionInterface.register(SDPA, top)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        adapter, cache = self.adapter, kwargs.get("cache")
        if adapter is None or cache is None or id(module) not in adapter.modules:
            return self.before(module, query, key, value, mask, **kwargs)
        del kwargs["cache"]
        # This also leaves in `kwargs` the lengths of the keys that this layer sees.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        return _attend(adapter, module, query, key, value, mask, kwargs)


def _attend(
    adapter: TransformersAdapter,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend the requests of a batch, which stand behind one another: `[1, M, Hq, Dv]`."""
    M, N = query.shape[2], key.shape[2]
    sequences = adapter.lengths.of(layer_of(module), kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    sequences = evolve(sequences, queries=M, keys=N)  # rows behind the last request are padding
    prompts = PromptMask((1, 1, M, N), N, query.device, sequences, window=kwargs.get("sliding_window"))
    call = AttentionCall(module, query, key, value, prompts, True, N, kwargs)
    reason = "decode" if all(span.queries <= 1 for span in sequences.spans) else call.dense_because()
    if reason is not None:
        adapter.outcomes.saw_dense(call.layer, reason)
        return dense(evolve(call, mask=prompts if mask is None else mask))
    out = adapter.layers[call.layer](query, key, value, sequences, **call.options())
    return out.transpose(1, 2).contiguous(), None

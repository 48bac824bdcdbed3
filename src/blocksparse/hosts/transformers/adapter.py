"""The function that transformers calls instead of its attention, with continuous batching too."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from inspect import signature
from threading import Lock
from typing import Any, Unpack, cast, final
from weakref import ref

import torch
import transformers
from attrs import Factory, define, evolve, field, frozen
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.batch.sequences import Sequences
from blocksparse.custom_op import OpaqueCall, attend
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.transformers.call import AttentionCall, LastLengths, dense, layer_of
from blocksparse.hosts.transformers.mask_request import mask_of
from blocksparse.hosts.transformers.prompt_mask import KnownPrompt, PromptMask, going_on, padded_behind
from blocksparse.inputs import UnsupportedError
from blocksparse.launch.torch_modes import refuse_tracing
from blocksparse.layers.head_groups import Attention, LayerTrace
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.spec import AttentionOptions, AttentionSpec

_log = logging.getLogger(__name__)
_COUNTING = Lock()  # several threads may run one model
_WAY_OUT = {
    "gradients": " (call the model under torch.no_grad())",
    "training": " (call model.eval() for inference)",
    "fewer than min_tokens": " (longer prompts are sparse; attach takes min_tokens)",
    "fewer than min_queries": " (larger chunks are sparse; attach takes min_queries)",
    "not attached": " (attach after all modules are in the model)",
    "mask": " (masks that are no padding, packing or window stay dense)",
}


@final
@define(eq=False)
class Outcomes:
    """Counts why calls were dense until one is sparse, and hands everything to the recorder, if there is one."""

    model: str
    recorder: DensityRecorder | None
    _reasons: Counter[str] = field(factory=Counter, init=False)
    _settled: bool = field(default=False, init=False)  # a call was sparse, or the line is in the log

    def saw(self, layer: int, trace: LayerTrace, *, q_len: int, k_len: int, window: int | None) -> None:
        """A call of the pipeline, whose executor may have attended densely."""
        assert self.recorder is not None  # or nothing would be traced
        if trace.dense_because is not None:
            self.saw_dense(layer, trace.dense_because)
            return
        self.saw_sparse()
        self.recorder.saw_sparse(layer, trace.density(), q_len=q_len, k_len=k_len, window=window)

    def saw_sparse(self) -> None:
        self._settled = True

    def saw_dense(self, layer: int, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.saw_dense(layer, reason)
        if self._settled:
            return
        if reason == "decode":
            self.tell()  # whatever prompt was read, all of it was dense
        else:
            with _COUNTING:
                self._reasons[reason] += 1

    def traced_dense(self, reason: str) -> None:
        """Calls of a compiled graph are dense; how many there will be is not known when it is traced."""
        if not self._settled and reason != "decode":
            with _COUNTING:
                self._reasons[f"{reason}, compiled"] += 1

    def tell(self) -> None:
        """Log one line if calls were dense and none was sparse. A later call does nothing."""
        with _COUNTING:
            if self._settled or not self._reasons:
                return
            self._settled = True
        reasons = ", ".join(
            f"{times} x {why}{_WAY_OUT.get(why, '')}" for why, times in self._reasons.most_common()
        )
        _log.warning("no attention call of %s was sparse so far; dense calls: %s", self.model, reasons)


@final
@frozen(eq=False)
class LayerAttention:
    """Attends each prompt of a call sparsely if it is long enough and the pipeline can run it, or else densely."""

    attention: Attention | None
    layer: int
    min_tokens: int
    min_queries: int
    min_window: int | None  # a sliding window of fewer tokens is dense; None for all windows
    outcomes: Outcomes
    begins: Callable[[], None] | None = None  # is told that a call of the layer begins
    _call: OpaqueCall = field(
        init=False,
        repr=False,
        default=Factory(
            lambda self: OpaqueCall(self._attend, begins=self.begins, ends=_attend_last), takes_self=True
        ),
    )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences | None = None,
        *,
        dropped: int = 0,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Attend with these options, where a cache has dropped so many tokens before the first key."""
        histories = None
        if dropped:
            firsts = [0] if sequences is None else [span.first_key for span in sequences.spans]
            histories = [0 if first else dropped for first in firsts]  # dropped padding counts too
        return attend(self._call, q, k, v, options, sequences, histories)

    def dense_because(self, queries: int, keys: int, window: int | None, history: int = 0) -> str | None:
        """The reason why a prompt of this size is dense in this layer, or None.

        Its cache holds `keys` tokens, and has dropped `history` tokens before these.
        """
        if queries == 1:
            return "decode"
        if self.attention is None:
            return "no pipeline for this layer"
        if window is not None and window < keys:
            if self.min_window is None:
                return "sliding window"
            if window < self.min_window:
                return "a sliding window of fewer than min_window"
        if history + keys < self.min_tokens:
            return "fewer than min_tokens"
        return "fewer than min_queries" if queries < self.min_queries else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, history: int = 0) -> Tensor:
        reason = self.dense_because(q.shape[2], k.shape[2], spec.window, history)
        if reason is None:
            assert self.attention is not None  # or there would be a reason
            try:
                if self.outcomes.recorder is None:
                    out = self.attention(q, k, v, **spec.arguments())
                    self.outcomes.saw_sparse()
                    return out
                trace = self.attention.trace(q, k, v, **spec.arguments())
            except UnsupportedError as error:
                reason = error.because
            else:
                self.outcomes.saw(self.layer, trace, q_len=q.shape[2], k_len=k.shape[2], window=spec.window)
                return trace.output.out
        self.outcomes.saw_dense(self.layer, reason)
        return dense_attention(q, k, v, spec)


def _attend_last(out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sequences: Sequences) -> None:
    """Attend with the last query of entries in which it is padding: `generate` goes on from there all the same."""
    N, window, plain = k.shape[2], spec.window, evolve(spec, window=None)
    for span in padded_behind(sequences):
        end = span.first_key + span.keys
        begin = span.first_key if window is None else max(span.first_key, N - window)
        if begin < end:
            one, seen = slice(span.entry, span.entry + 1), slice(begin, end)
            out[one, :, -1:] = dense_attention(q[one, :, -1:], k[one, :, seen], v[one, :, seen], plain)


@final
@frozen(eq=False)
class TransformersAdapter:
    """The attention function that an attached model calls."""

    layers: Mapping[int, LayerAttention]  # by `layer_idx`, -1 for attention without one
    modules: frozenset[int]  # ids of the model's modules, because another model may share a config and call this
    eager: frozenset[int]  # ids of those modules and configs that attended by the models' own functions before
    refused: Mapping[int, frozenset[str]]  # by id of a module: options that its own attention may leave out
    outcomes: Outcomes
    model: ref[nn.Module]
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
        own = id(request.get("config")) in self.eager
        return mask_of(request.get("dtype", torch.float32) if own else None, **request)

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
        for name in self.refused.get(id(module), ()):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} passes {name!r} on, which it or a pipeline may ignore. Leave it out."
                )
        call = AttentionCall.of(
            module, query, key, value, attention_mask, kwargs, self.lengths, eager=id(module) in self.eager
        )
        known = id(module) in self.modules  # or it was put in since, or belongs to a model with the same config
        layer, seen = self.layers[call.layer if known else -1], call.seen
        reason = call.dense_because() if known else "not attached"
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

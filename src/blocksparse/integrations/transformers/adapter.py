"""The two functions that transformers calls for an attached model: one makes masks, the other attends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch
from attrs import field, frozen
from torch import Tensor, nn

from blocksparse.integrations.transformers.call import Call
from blocksparse.integrations.transformers.dense import dense
from blocksparse.integrations.transformers.known_prompt import KnownPrompt, going_on
from blocksparse.integrations.transformers.last_lengths import LastLengths
from blocksparse.integrations.transformers.layer import LayerAttention
from blocksparse.integrations.transformers.mask_request import mask_of
from blocksparse.integrations.transformers.outcomes import Outcomes
from blocksparse.integrations.transformers.prompt_mask import PromptMask


@final
@frozen(eq=False)
class Adapter:
    """What an attached model calls."""

    layers: Mapping[int, LayerAttention]  # by `layer_idx`, -1 for attention without one
    modules: frozenset[int]  # ids of the model's modules, because another model may share a config and call this
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
        call = Call.of(module, query, key, value, attention_mask, kwargs, self.lengths)
        if id(module) not in self.modules:
            return dense(call)
        layer, seen, reason = self.layers[call.layer], call.seen, call.dense_because()
        asked = call.asked()
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

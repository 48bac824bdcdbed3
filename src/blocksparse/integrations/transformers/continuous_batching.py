"""Where calls of continuous batching (`generate_batch`) can be met in transformers: in its "sdpa" function."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, final

import transformers
from attrs import define, evolve
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blocksparse.integrations.transformers.adapter import Adapter
from blocksparse.integrations.transformers.call import Call, layer_of
from blocksparse.integrations.transformers.dense import dense
from blocksparse.integrations.transformers.prompt_mask import PromptMask

SDPA = "sdpa"


@final
@define(eq=False)
class SdpaInPlace:
    """Stands in for transformers' function of the name "sdpa", and hands to an adapter the calls of its model.

    Continuous batching refuses every name that it does not know, so an attachment can have none of its own there.
    Calls of other models, and calls without a paged cache, go to the function that had the name before.
    """

    adapter: Adapter | None  # None when the attachment has ended
    before: Callable[..., Any]

    @classmethod
    def put(cls, adapter: Adapter) -> SdpaInPlace:
        """Take the name.

        Raises:
            ValueError: this version of transformers does not give its sdpa function the paged cache.
        """
        if "cache" not in signature(sdpa_attention_forward).parameters:
            raise ValueError(
                f"continuous batching needs transformers 5.23 or later: {transformers.__version__}; before, "
                "its calls do not come to the function of the name sdpa"
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
    adapter: Adapter,
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
    call = Call(module, query, key, value, prompts, True, N, kwargs)
    reason = "decode" if all(span.queries <= 1 for span in sequences.spans) else call.dense_because()
    if reason is not None:
        adapter.outcomes.saw_dense(call.layer, reason)
        return dense(evolve(call, mask=prompts if mask is None else mask))
    out = adapter.layers[call.layer](query, key, value, sequences, **call.asked())
    return out.transpose(1, 2).contiguous(), None

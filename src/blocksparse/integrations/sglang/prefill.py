"""What attends to prompts in all layers of an SGLang engine: a pipeline per layer, and the stock backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, final

from attrs import define, field
from torch import Tensor

from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.integrations.serving.kinds import Kinds
from blocksparse.integrations.serving.layer import LayerAttention, record_dense
from blocksparse.integrations.sglang.batch import Batch
from blocksparse.integrations.sglang.reasons import call_is_dense_because

_log = logging.getLogger(__name__)


@final
@define(eq=False)
class SparsePrefill:
    """In the place of `forward_extend` of a stock backend: sparse prompts here, everything else there.

    SGLang calls it for one layer after another, and makes a ForwardBatch per step. What was found out about a
    batch is kept until the next one comes, or the first layer again.

    Args:
        stock: `forward_extend` of that backend, for whole batches.
        rests: others of its kind, one for each kind of layers, for parts of batches, because backends keep what
            they prepared for a batch.
        layers: what attends in each layer (SGLang's RadixAttention), or the reason why it is dense.
        slots: where in the cache the tokens of each request lie, `[requests of the pool, tokens]`.
        cache: SGLang's pool of keys and values.
        write_loc: makes, of a batch and a layer, what the pool wants to know about where to write.
    """

    stock: Callable[..., Any]
    rests: Sequence[Any]
    layers: dict[Any, LayerAttention | str]
    kinds: Kinds
    recorder: DensityRecorder | None
    slots: Tensor
    cache: Any
    write_loc: Callable[[Any, Any], Any]
    _seen: tuple[Any, list[Batch]] | None = field(init=False, default=None)
    _last: int = field(init=False, default=-1)

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Attend the new tokens of a batch, `q` `[tokens, Hq * D]`, to all tokens of their requests.

        `k` and `v` `[tokens, Hkv, D]` are those of the new tokens, for the cache. With `save_kv_cache` false they
        are there already: a model's kernel wrote them while it rotated them (qwen3_moe and others), or an earlier
        layer or loop did, whose keys this one shares (gemma3n, iquest_loopcoder).
        """
        index = layer.layer_id
        attention = self.layers.get(layer, "no layer of the model")
        kind = 0 if isinstance(attention, str) else self.kinds.index(attention.pipeline)
        batch = self._batches(forward_batch, index, q.shape[0])[kind]
        if not isinstance(attention, str) and (because := call_is_dense_because(options)):
            _warn_once(index, because)
            attention = because
        dense = attention if isinstance(attention, str) else None
        record_dense(self.recorder, index, batch.reasons, batch.prefills, dense)
        if batch.prefills is None or isinstance(attention, str):
            return self.stock(q, k, v, layer, forward_batch, save_kv_cache, **options)
        if save_kv_cache and k is not None:
            self.cache.set_kv_buffer(layer, self.write_loc(forward_batch, layer), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # SGLang has room for the output already if graphs of the other layers read it.
        given = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim) if given is None else given
        rows = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        if batch.rest_batch is not None:
            q_rest, k_rest, v_rest = (None if x is None else batch.rest.take(x) for x in (q, k, v))
            part = batch.backend.forward_extend(q_rest, k_rest, v_rest, layer, batch.rest_batch, False)
            _put(batch, rows, part.view(-1, *rows.shape[1:]))
        keys, values = (
            buffer.unsqueeze(2)  # [slots, Hkv, 1, D]
            for buffer in (self.cache.get_key_buffer(index), self.cache.get_value_buffer(index))
        )
        attention(query, keys, values, rows, batch.prefills, scale=layer.scaling)
        return out

    def _batches(self, forward_batch: Any, layer: int, tokens: int) -> list[Batch]:
        """What is known of a batch. The same object may come again with other requests in it, in another step."""
        if self._seen is None or self._seen[0] is not forward_batch or layer <= self._last:
            batches = Batch.of_kinds(forward_batch, tokens=tokens, slots=self.slots, kinds=self.kinds)
            for batch, rest in zip(batches, self.rests, strict=False):
                if batch.rest_batch is not None and batch.backend is None:
                    rest.init_forward_metadata(batch.rest_batch)
                    batch.backend = rest
            self._seen = forward_batch, batches
        self._last = layer
        return self._seen[1]


@lru_cache(maxsize=1024)
def _warn_once(layer: int, because: str) -> None:
    _log.warning("blocksparse: prompts are dense in layer %d, because its calls bring: %s", layer, because)


def _put(batch: Batch, rows: Tensor, part: Tensor) -> None:
    for start, stop in batch.rest.ranges:
        rows[start:stop], part = part[: stop - start], part[stop - start :]

"""What attends to prompts in all layers of an SGLang engine: a pipeline per layer, and the stock backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from attrs import define, field
from torch import Tensor

from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.integrations.serving.layer import LayerAttention, record_dense
from blocksparse.integrations.serving.settings import Settings
from blocksparse.integrations.sglang.batch import Batch
from blocksparse.integrations.sglang.reasons import call_is_dense_because


@final
@define(eq=False)
class SparsePrefill:
    """In the place of `forward_extend` of a stock backend: sparse prompts here, everything else there.

    SGLang calls it for one layer after another, and makes a ForwardBatch per step. What was found out about a
    batch is kept until the next one comes, or the first layer again.

    Args:
        stock: `forward_extend` of that backend, for whole batches.
        rest: another one of its kind, for parts of batches, because backends keep what they prepared for a batch.
        layers: what attends in each layer (SGLang's RadixAttention), or the reason why it is dense.
        slots: where in the cache the tokens of each request lie, `[requests of the pool, tokens]`.
        cache: SGLang's pool of keys and values.
        write_loc: makes, of a batch and a layer, what the pool wants to know about where to write.
    """

    stock: Callable[..., Any]
    rest: Any
    layers: dict[Any, LayerAttention | str]
    settings: Settings
    recorder: DensityRecorder | None
    slots: Tensor
    cache: Any
    write_loc: Callable[[Any, Any], Any]
    _seen: tuple[Any, Batch] | None = field(init=False, default=None)
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

        `k` and `v` `[tokens, Hkv, D]` are those of the new tokens, which are not in the cache yet.
        """
        index = layer.layer_id
        batch = self._batch(forward_batch, index, q.shape[0])
        attention = self.layers.get(layer, "no layer of the model")
        has_keys = k is not None and v is not None and save_kv_cache
        if not isinstance(attention, str) and (because := call_is_dense_because(options, has_keys=has_keys)):
            attention = because
        dense = attention if isinstance(attention, str) else None
        record_dense(self.recorder, index, batch.reasons, batch.prefills, dense)
        if batch.prefills is None or isinstance(attention, str):
            return self.stock(q, k, v, layer, forward_batch, save_kv_cache, **options)
        self.cache.set_kv_buffer(layer, self.write_loc(forward_batch, layer), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # SGLang has room for the output already if graphs of the other layers read it.
        given = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim) if given is None else given
        rows = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        if batch.rest_batch is not None:
            q_rest, k_rest, v_rest = (batch.rest.take(x) for x in (q, k, v))
            part = self.rest.forward_extend(q_rest, k_rest, v_rest, layer, batch.rest_batch, False)
            _put(batch, rows, part.view(-1, *rows.shape[1:]))
        keys, values = (
            buffer.unsqueeze(2)  # [slots, Hkv, 1, D]
            for buffer in (self.cache.get_key_buffer(index), self.cache.get_value_buffer(index))
        )
        attention(query, keys, values, rows, batch.prefills, scale=layer.scaling)
        return out

    def _batch(self, forward_batch: Any, layer: int, tokens: int) -> Batch:
        """What is known of a batch. The same object may come again with other requests in it, in another step."""
        if self._seen is None or self._seen[0] is not forward_batch or layer <= self._last:
            batch = Batch.of(forward_batch, tokens=tokens, slots=self.slots, settings=self.settings)
            if batch.rest_batch is not None:
                self.rest.init_forward_metadata(batch.rest_batch)
            self._seen = forward_batch, batch
        self._last = layer
        return self._seen[1]


def _put(batch: Batch, rows: Tensor, part: Tensor) -> None:
    for start, stop in batch.rest.ranges:
        rows[start:stop], part = part[: stop - start], part[stop - start :]

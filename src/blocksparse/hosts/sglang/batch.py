"""What SGLang asks for in one step: prompts that go sparse and how they attend, and why others do not."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.hosts.serving.layer import PagedAttention, record_dense
from blocksparse.hosts.serving.runs import Prefills, Runs, Split
from blocksparse.hosts.serving.worth import Kinds
from blocksparse.inputs import MAX_HEAD_DIM
from blocksparse.observe.density_recorder import DensityRecorder

# Arguments of one call of a layer that change what attention means, and the reasons that a DensityRecorder gets.
_NOT_PLAIN = {"sinks": "attention sinks", "rel_bias": "position bias"}


def layer_is_dense_because(layer: Any, *, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """The first reason why a layer is dense in every call, or None.

    Args:
        layer: SGLang's RadixAttention.
        dtype: that of the model.
        cache_dtype: that of the keys and values in the cache.
    """
    reasons = {
        "cross attention": layer.is_cross_attention,
        "not causal": layer.attn_type.value != "decoder",
        "sliding window": layer.sliding_window_size > -1,
        "chunked attention": layer.use_irope,
        "softcap": layer.logit_cap > 0,
        "position bias": layer.pos_encoding_mode != "NONE",
        "temperature by length": layer.xai_temperature_len > 0,
        f"head dim above {MAX_HEAD_DIM}": max(layer.qk_head_dim, layer.v_head_dim) > MAX_HEAD_DIM,
        f"KV cache in {str(cache_dtype).removeprefix('torch.')}": cache_dtype != dtype,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def call_is_dense_because(options: Mapping[str, Any]) -> str | None:
    """The first reason why one call of a layer is dense, or None.

    Args:
        options: all arguments that change what attention means or gives. One that is unknown here is a reason by
            its name.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            return _NOT_PLAIN.get(name, name)
    return None


def batch_is_dense_because(batch: Any, *, tokens: int) -> str | None:
    """The first reason why a ForwardBatch is dense, or None.

    Args:
        tokens: the queries that came with it.
    """
    if batch.forward_mode.name not in ("EXTEND", "MIXED"):
        return str(batch.forward_mode.name).lower().replace("_", " ")  # as "target verify", of drafts
    if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
        return "lengths that only the GPU knows"
    if batch.encoder_lens is not None:
        return "cross attention"
    if batch.cross_attention_custom_mask is not None or batch.multi_item_delimiter_indices is not None:
        return "mask"
    return "padded batch" if sum(batch.extend_seq_lens_cpu) != tokens else None


# Fields of SGLang's ForwardBatch with an entry per request, as tensors and as lists, and with one per token.
_PER_REQUEST = (
    "req_pool_indices",
    "req_pool_indices_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "orig_seq_lens",
    "extend_seq_lens",
    "extend_prefix_lens",
)
_LISTED = (
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "lora_ids",
    "rids",
    "mm_inputs",
)
# Of ours: how many tokens of each request are known before it decodes. `register` sets it.
PROMPTS = "blocksparse_prompts"
_PER_TOKEN = ("input_ids", "positions", "out_cache_loc", "out_cache_loc_virtual")


@final
@define(eq=False)
class Batch:
    """One step of the engine."""

    reasons: Counter[str]  # of the dense requests
    prefills: Prefills | None = None
    rest: Runs = field(factory=Runs)  # the tokens of the dense requests
    rest_batch: Any = None  # SGLang's ForwardBatch of these requests, None if there are none
    backend: Any = None  # which has prepared it

    @classmethod
    def of_kinds(cls, batch: Any, *, tokens: int, slots: Tensor, kinds: Kinds) -> list[Batch]:
        """The batch of each kind of layers; those that are split alike share one.

        Args:
            batch: SGLang's ForwardBatch.
            tokens: the queries that came with it.
            slots: the place in the cache of each token. Shape `[requests of the pool, tokens]`.
        """
        if (dense := batch_is_dense_because(batch, tokens=tokens)) is not None:
            return [cls(Counter({dense: batch.batch_size}))] * max(len(kinds.pipelines), 1)
        starts = [0, *accumulate(batch.extend_seq_lens_cpu)]
        keys = [
            context + queries
            for context, queries in zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        ]
        own = {i: "mask" for i, pictures in enumerate(batch.mm_inputs or ()) if pictures is not None}
        prompts = getattr(batch, PROMPTS, None)
        if prompts is None or len(prompts) != len(keys):  # made elsewhere, as parts of a batch are
            prompts = keys
        remaining = [max(prompt - tokens, 0) for prompt, tokens in zip(prompts, keys, strict=True)]
        splits = kinds.splits(starts, keys, own=own, remaining=remaining)
        made = {split.sparse: split for split in splits}
        batches = {sparse: cls._of(batch, split, starts, keys, remaining, slots) for sparse, split in made.items()}
        return [batches[split.sparse] for split in splits]

    @classmethod
    def _of(
        cls, batch: Any, split: Split, starts: list[int], keys: list[int], remaining: list[int], slots: Tensor
    ) -> Batch:
        if not split.sparse.ranges:
            return cls(split.reasons)
        longest = max(keys[request] for request in split.sparse)
        # SGLang gives each token its own slot, so that every page here has one token.
        pages = slots[split.sparse.take(batch.req_pool_indices), :longest]
        prefills = Prefills.of(split.sparse, pages, starts=starts, keys=keys, page_size=1, remaining=remaining)
        rest = split.rest.of_tokens(starts)
        return cls(split.reasons, prefills, rest, part_of(batch, split.rest, rest) if rest.ranges else None)


def part_of(batch: Any, requests: Runs, tokens: Runs) -> Any:
    """SGLang's ForwardBatch of some requests of a batch, as far as attention reads it. This waits for no GPU."""
    part = copy.copy(batch)
    for names, rows in ((_PER_REQUEST, requests), (_PER_TOKEN, tokens)):
        for name in names:
            if (value := getattr(batch, name)) is not None:
                setattr(part, name, rows.take(value))
    for name in _LISTED:
        if (listed := getattr(batch, name)) is not None:
            setattr(part, name, [listed[request] for request in requests])
    part.batch_size = len(requests)
    part.seq_lens_sum = sum(part.extend_seq_lens_cpu) + sum(part.extend_prefix_lens_cpu)
    part.extend_num_tokens = part.global_num_token_non_padded_cpu = len(tokens)
    part.extend_start_loc = pad(part.extend_seq_lens.cumsum(0, dtype=batch.extend_start_loc.dtype)[:-1], (1, 0))
    part._attn_output = None
    return part


_log = logging.getLogger(__name__)


@final
@define(eq=False)
class SparseExtend:
    """Replacement of a native backend's `forward_extend`: sparse prompts here, everything else there.

    SGLang calls it for one layer after another, and makes a ForwardBatch per step. What was found out about a
    batch is kept until the next one comes, or the first layer again.

    Args:
        stock: `forward_extend` of that backend, for whole batches.
        rests: one more for each kind of layers, for parts of batches. Backends keep what they prepared for a
            batch.
        layers: what attends in each layer, or why it is dense. A layer is SGLang's RadixAttention.
        slots: the place in the cache of each token. Shape `[requests of the pool, tokens]`.
        cache: SGLang's pool of keys and values.
        write_loc: tells the pool where a batch writes in a layer.
    """

    stock: Callable[..., Any]
    rests: Sequence[Any]
    layers: dict[Any, PagedAttention | str]
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
        are in the cache already. Either the model's RoPE kernel wrote them (qwen3_moe and others), or an earlier
        layer or loop with which this one shares keys (gemma3n, iquest_loopcoder).
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
            part = part.view(-1, *rows.shape[1:])
            for start, stop in batch.rest.ranges:
                rows[start:stop], part = part[: stop - start], part[stop - start :]
        keys, values = (
            buffer.unsqueeze(2)  # [slots, Hkv, 1, D]
            for buffer in (self.cache.get_key_buffer(index), self.cache.get_value_buffer(index))
        )
        attention(query, keys, values, rows, batch.prefills, scale=layer.scaling)
        return out

    def _batches(self, forward_batch: Any, layer: int, tokens: int) -> list[Batch]:
        """The batch as split for each kind of layers. In another step the same object may have other requests."""
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
    _log.warning(
        "blocksparse: prompts are dense in layer %d, because of an argument of its calls: %s", layer, because
    )

"""vLLM's attention in one layer: which prompts of a batch go sparse, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config

from blocksparse.hosts.serving.layer import LayerAttention, record_dense
from blocksparse.hosts.serving.runs import Prefills, Runs, Split
from blocksparse.hosts.serving.worth import Worth
from blocksparse.hosts.vllm.engine import NO_LAYER, Engine, is_configured, layer_of
from blocksparse.inputs import MAX_HEAD_DIM

_KINDS = {"encoder": "not causal", "encoder_only": "not causal", "encoder_decoder": "cross attention"}
# Arguments that must be None, or 0, and the reasons that a DensityRecorder gets for others.
_NOT_PLAIN = {
    "alibi_slopes": "position bias",
    "sliding_window": "sliding window",
    "logits_soft_cap": "softcap",
    "sinks": "attention sinks",
}


def dense_because(
    *, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, attn_type: str, options: Mapping[str, Any]
) -> str | None:
    """The first reason why a layer is dense, or None.

    Args:
        dtype: that of the model. vLLM calls a cache in it "auto", or by its name.
        options: all arguments that change what attention means. One that is unknown here is a reason by its name.
    """
    if attn_type != "decoder":
        return _KINDS.get(attn_type, attn_type)
    for name, value in options.items():
        if value is not None and not (name == "logits_soft_cap" and value == 0):
            return _NOT_PLAIN.get(name, name)
    if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
        return f"KV cache in {kv_cache_dtype}"
    return f"head dim above {MAX_HEAD_DIM}" if head_size > MAX_HEAD_DIM else None


# Fields of vLLM's CommonAttentionMetadata with an entry per request, and per token. Versions lack some of them.
_PER_REQUEST = (
    "seq_lens",
    "block_table_tensor",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "rswa_prefix_lens",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "replayssm_decode_base_cpu",
)
_PER_TOKEN = ("slot_mapping", "positions")


@final
@frozen(eq=False)
class Batch:
    """One step of the engine. It travels on what the stock backend's builder made of the whole batch."""

    reasons: Counter[str]  # of the dense requests
    prefills: Prefills | None = None
    rest: Runs = field(factory=Runs)  # the tokens of the dense requests
    rest_metadata: Any = None  # with which the stock backend attends to `rest` alone

    @classmethod
    def of(
        cls, common: Any, split: Split, keys: list[int], *, page_size: int, build: Callable[[Any], Any]
    ) -> Batch:
        """
        Args:
            common: vLLM's CommonAttentionMetadata of the whole batch.
            keys: the tokens of each request, its context and its queries together.
            build: makes the stock backend's metadata of a batch.
        """
        if not split.sparse.ranges:
            return cls(split.reasons)
        starts = common.query_start_loc_cpu.tolist()
        pages = split.sparse.take(common.block_table_tensor)
        prefills = Prefills.of(split.sparse, pages, starts=starts, keys=keys, page_size=page_size)
        rest = split.rest.of_tokens(starts)
        return cls(
            split.reasons, prefills, rest, build(part_of(common, split.rest, rest)) if rest.ranges else None
        )


def part_of(common: Any, requests: Runs, tokens: Runs) -> Any:
    """vLLM's CommonAttentionMetadata of some requests of a batch. No number on a GPU is read."""
    changed: dict[str, Any] = {}
    for names, rows in ((_PER_REQUEST, requests), (_PER_TOKEN, tokens)):
        for name in names:
            if (value := getattr(common, name, None)) is not None:
                changed[name] = rows.take(value)
    for name in ("query_start_loc", "query_start_loc_cpu"):
        starts = getattr(common, name)
        lengths = requests.take(starts[1:] - starts[:-1])
        changed[name] = pad(lengths.cumsum(0, dtype=starts.dtype), (1, 0))
    if ranges := getattr(common, "mm_req_doc_ranges", None):
        changed["mm_req_doc_ranges"] = {
            new: ranges[old] for new, old in enumerate(requests) if ranges.get(old) is not None
        }
    ends = changed["query_start_loc_cpu"].tolist()
    return common.replace(
        num_reqs=len(requests),
        num_actual_tokens=len(tokens),
        max_query_len=max(stop - start for start, stop in pairwise(ends)),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **changed,
    )


class SparsePrefill:
    """Stands before a stock `AttentionImpl` in the bases of a class, and leaves to it what does not go sparse.

    vLLM makes these objects itself and reads class attributes of them, hence a base class with state.
    """

    supports_pcp: ClassVar[bool] = False  # several GPUs hold parts of one prompt, or of its keys
    supports_dcp: ClassVar[bool] = False
    needs_configuration: ClassVar[bool] = True

    engine: Engine | None
    layer: int
    attention: LayerAttention | None  # None is the stock backend alone
    heads: tuple[int, int, int]  # of queries, of keys, and their dim
    kind: int  # of its pipeline, among those of the layers that share batches
    dense_because: str | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        stock: Any = super()
        stock.__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **more,
        )
        config = get_current_vllm_config()
        self.engine = Engine.of(config) if self.needs_configuration or is_configured(config) else None
        self.layer, self.attention, self.kind = -1, None, 0
        self._cold = True  # until vLLM runs the model without a batch, to measure its memory
        self.heads = num_heads, num_kv_heads or num_heads, head_size
        self.decodes = attn_type == "decoder"  # layers of encoders have numbers of their own
        self._layers = config.compilation_config.static_forward_context
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        self._reason = dense_because(
            head_size=head_size,
            dtype=config.model_config.dtype,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type,
            options=options | more,
        )
        self.dense_because = self._reason

    def place(self, name: str, layer: Any) -> None:
        """Learn which layer of the model this is, which vLLM does not say when it makes this object."""
        if self.engine is None:
            return
        self.layer = layer_of(name)
        reason = self._reason or self.unreadable(layer) or self._drafts(name)
        attention = reason or self.engine.attention(self.layer)
        if isinstance(attention, LayerAttention):
            self.attention, self.dense_because = attention, None
        else:
            self.attention, self.dense_because = None, attention

    def _drafts(self, name: str) -> str | None:
        """The reason of a layer of a model that drafts: the model has one of its number already."""
        for other, layer in self._layers.items():
            impl = getattr(layer, "impl", None)
            if isinstance(impl, SparsePrefill) and impl.decodes and layer_of(other) == self.layer:
                return None if other == name else NO_LAYER
        return None

    def worth(self, dtype: torch.dtype, device: Any) -> Worth:
        """Which requests would save nothing in layers like this one."""
        assert self.engine is not None
        heads, kv_heads, head_dim = self.heads
        like = torch.empty((), dtype=dtype, device=device)
        return Worth.of(self.engine.settings.dense_below, like, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def unreadable(self, layer: Any) -> str | None:
        """The reason why the cache of this layer cannot be read, or None."""
        return None

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the keys and values in a cache: `[pages, Hkv, page_size, D]` each, with any strides."""
        D: int = self.head_size  # type: ignore[attr-defined]  # of the stock class
        keys, values = kv_cache.split(D, dim=-1)
        return keys, values

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the new tokens of a batch, `query` `[tokens, Hq, D]`, to the pages of their requests.

        The new keys and values are in the cache already. `key` and `value` are those of these tokens.
        """
        stock: Any = super()
        batches: list[Batch] | None = getattr(attn_metadata, "blocksparse", None)
        if batches is None:  # nothing of this step goes sparse
            if attn_metadata is None and self._cold:
                self._warm(layer, query, output)
            return stock.forward(  # type: ignore[no-any-return]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert self.engine is not None
        batch, scales = batches[self.kind], (output_scale, output_block_scale)
        record_dense(self.engine.recorder, self.layer, batch.reasons, batch.prefills, self.dense_because)
        if batch.prefills is None or self.attention is None:
            return stock.forward(  # type: ignore[no-any-return]
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
        if batch.rest_metadata is not None:
            some = [None if x is None else batch.rest.take(x) for x in (query, key, value)]
            out = batch.rest.take(output)
            stock.forward(layer, *some, kv_cache, batch.rest_metadata, out, *scales)
            batch.rest.put(output, out)
        keys, values = self.pages(kv_cache)
        scale: float = self.scale  # type: ignore[attr-defined]  # of the stock class
        self.attention(query, keys, values, output, batch.prefills, scale=scale)
        return output

    def _warm(self, layer: Any, query: Tensor, output: Tensor) -> None:
        """Prefill once in each size that a request may have, while vLLM measures its memory."""
        self._cold = False
        self.place(layer.layer_name, layer)
        if self.engine is not None and self.attention is not None:
            self.engine.warm(self.attention, self.worth(query.dtype, query.device), query, output)

"""The part of a vLLM attention layer that attends: sparse prompts here, everything else in the native backend."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import evolve
from torch import Tensor
from vllm.config import get_current_vllm_config

from blocksparse.hosts.serving.layer import PagedAttention, record_dense
from blocksparse.hosts.serving.worth import Worth
from blocksparse.hosts.vllm.batch import SplitMetadata, dense_because
from blocksparse.hosts.vllm.engine import NO_LAYER, Engine, is_configured, layer_of


class SparsePrefill:
    """Mixin before a native `AttentionImpl` in the bases of a class, which runs everything that stays dense.

    This is a base class with state because vLLM makes these objects itself and reads their class attributes.
    """

    supports_pcp: ClassVar[bool] = False  # several GPUs hold parts of one prompt, or of its keys
    supports_dcp: ClassVar[bool] = False
    needs_configuration: ClassVar[bool] = True

    engine: Engine | None
    layer: int
    attention: PagedAttention | None  # None is the native backend alone
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
        self.decodes = attn_type == "decoder"  # layers of encoders have their own numbers
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
        self._softcap, self._sinks = logits_soft_cap or None, more.get("sinks")

    def place(self, name: str, layer: Any) -> None:
        """Learn which layer of the model this is, which vLLM does not say when it makes this object."""
        if self.engine is None:
            return
        self.layer = layer_of(name)
        reason = self._reason or self.unreadable(layer) or self._drafts(name)
        attention = reason or self.engine.attention(self.layer)
        if isinstance(attention, PagedAttention):
            self.attention = evolve(attention, softcap=self._softcap, sinks=self._sinks)
            self.dense_because = None
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

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor | None]:
        """The keys and values in a cache, as a `Prompt` has them, with any strides."""
        return kv_cache, None

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
        batches: list[SplitMetadata] | None = getattr(attn_metadata, "blocksparse", None)
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
        scale: float = self.scale  # type: ignore[attr-defined]  # of the native class
        self.attention(query, keys, values, output, batch.prefills, scale=scale)
        return output

    def _warm(self, layer: Any, query: Tensor, output: Tensor) -> None:
        """Prefill once in each size that a request may have, while vLLM measures its memory."""
        self._cold = False
        self.place(layer.layer_name, layer)
        if self.engine is not None and self.attention is not None:
            self.engine.warm(self.attention, self.worth(query.dtype, query.device), query, output)

"""The part of a vLLM attention backend that prepares a batch: it splits off the requests that go sparse."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionCGSupport

from blocksparse.integrations.serving.settings import Settings
from blocksparse.integrations.serving.split import Split
from blocksparse.integrations.vllm.batch import Batch
from blocksparse.integrations.vllm.engine import Engine
from blocksparse.integrations.vllm.impl import SparsePrefill

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class SplitBatches:
    """Stands before a stock `AttentionMetadataBuilder` in the bases of a class.

    What the stock builder makes of a batch stays as it is, and gets one attribute more, the `Batch`. vLLM makes
    these objects itself and reads class attributes of them, hence a base class with state.
    """

    stock: ClassVar[Any]  # the stock builder, which also prepares the requests that do not go sparse
    supports_update_block_table: ClassVar[bool] = False  # another group of layers has other pages

    engine: Engine | None = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **more: Any
    ) -> None:
        stock: Any = super()
        stock.__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        self._page_size = int(kv_cache_spec.block_size)
        layers = vllm_config.compilation_config.static_forward_context
        impls = {name: layers[name].impl for name in layer_names if isinstance(layers[name].impl, SparsePrefill)}
        for name, impl in impls.items():
            impl.place(name, layers[name])
        self.engine = next((impl.engine for impl in impls.values()), None)
        self._any_sparse = any(impl.attention is not None for impl in impls.values())
        if self.engine is not None:
            # Of its own, because builders keep buffers that the next batch overwrites.
            self._of_rest = self.stock(kv_cache_spec, layer_names, vllm_config, device, **more)
            _log.info("blocksparse: %s", _summary(impls))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Graphs of batches that only decode, as the stock backend has them, and of no other batch."""
        stock: Any = super()
        support = stock.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda x: x.value)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        stock: Any = super()
        metadata = stock.build(common_prefix_len, common_attn_metadata, fast_build)
        if (engine := self.engine) is not None:
            long = self._any_sparse and common_attn_metadata.max_query_len >= engine.settings.min_queries
            if long or engine.recorder is not None:
                metadata.blocksparse = self._batch(common_attn_metadata, engine.settings)
        return metadata

    def _batch(self, common: Any, settings: Settings) -> Batch:
        dense = None
        starts, keys = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
        if type(self).build is not SplitBatches.build:
            # vLLM's layers with a sink of tokens, among others, change lengths and pages on the GPU alone.
            dense = "another builder changes batches"
        elif common.causal is not True:
            dense = "not causal"
        elif getattr(common, "rswa_prefix_lens", None) is not None:
            dense = "sliding window"
        elif keys is None:
            dense = "lengths that only the GPU knows"
        lengths = [0] * (len(starts) - 1) if keys is None else keys.tolist()
        pictures = getattr(common, "mm_req_doc_ranges", None) or {}
        split = Split.of(
            starts,
            lengths,
            min_tokens=settings.min_tokens,
            min_queries=settings.min_queries,
            dense=dense,
            masked=frozenset(request for request, ranges in pictures.items() if ranges),
        )
        return Batch.of(
            common, split, lengths, page_size=self._page_size, build=lambda rest: self._of_rest.build(0, rest)
        )


def _summary(impls: dict[str, SparsePrefill]) -> str:
    """Which layers are sparse and why the others are not, in one line."""
    groups: dict[str, list[str]] = {}
    for impl in impls.values():
        state = "sparse" if impl.attention is not None else f"dense ({impl.dense_because})"
        groups.setdefault(state, []).append(str(impl.layer))
    return "; ".join(f"{state} in layers {', '.join(layers)}" for state, layers in groups.items())

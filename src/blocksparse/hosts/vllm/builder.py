"""The part of a vLLM attention backend that prepares a batch: it splits off the requests that go sparse."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu_worker import Worker

from blocksparse.check.per_head import read_changed_again
from blocksparse.hosts.serving.runs import Runs, Split
from blocksparse.hosts.serving.worth import Kinds
from blocksparse.hosts.vllm.batch import SplitMetadata
from blocksparse.hosts.vllm.impl import SparsePrefill
from blocksparse.hosts.vllm.requests import TURNED_OFF, Requests, watch
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.observe.metrics import PromptCounters

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class SplitBatches:
    """Mixin that stands before a native `AttentionMetadataBuilder` in the bases of a class.

    The native metadata of a batch stays unchanged. If a request of the batch goes sparse, the metadata gets one
    more attribute: a `SplitMetadata` for each kind of layers. This is a base class with state because vLLM makes
    these objects itself and reads their class attributes.
    """

    stock: ClassVar[Any]  # the native builder, which also prepares the requests that do not go sparse
    supports_update_block_table: ClassVar[bool] = False  # another group of layers has other pages

    _kinds: Kinds | None = None  # None is the native backend alone
    _recorder: DensityRecorder | None = None
    _counters: PromptCounters | None = None
    _sinks: Sequence[Tensor] = ()  # of the sparse layers

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
        engine = next((impl.engine for impl in impls.values() if impl.engine is not None), None)
        if engine is None:
            return
        watch(Worker)
        sparse = [impl for impl in impls.values() if impl.attention is not None]
        self._recorder = engine.recorder
        first = next(iter(sparse or impls.values()))
        self._kinds = Kinds.of(
            (impl.attention.pipeline for impl in sparse if impl.attention is not None),
            engine.settings,
            first.worth(vllm_config.model_config.dtype, device),
        )
        for impl in sparse:
            assert impl.attention is not None
            impl.kind = self._kinds.index(impl.attention.pipeline)
        given = (impl.attention.sinks for impl in sparse if impl.attention is not None)
        self._sinks = [sinks for sinks in given if sinks is not None]
        # Of their own, because builders keep buffers that the next batch overwrites.
        self._of_rest = [
            self.stock(kv_cache_spec, layer_names, vllm_config, device, **more) for _ in self._kinds.pipelines
        ]
        how = [f" ({engine.threshold(kind, self._kinds.worth)}, by {kind!r})" for kind in self._kinds.pipelines]
        _log.info("blocksparse: %s", _summary(impls.values(), how))
        every = [
            impl for layer in layers.values() if isinstance(impl := getattr(layer, "impl", None), SparsePrefill)
        ]
        if all(impl.dense_because is not None for impl in every):
            _warn_once(", ".join(sorted({str(impl.dense_because) for impl in every})))
        names = [name for name, impl in impls.items() if impl.attention is not None]
        if names and vllm_config.parallel_config.rank == 0 and engine.counters.is_of(names[0]):
            self._counters = engine.counters

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """CUDA graphs for batches that only decode, as in the native backend, and for no other batch."""
        stock: Any = super()
        support = stock.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda x: x.value)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        stock: Any = super()
        metadata = stock.build(common_prefix_len, common_attn_metadata, fast_build)
        # A step that only decodes, or whose prompts are short, ends here: its layers find no batches of ours.
        if (kinds := self._kinds) is not None and (
            (kinds.pipelines and common_attn_metadata.max_query_len >= kinds.settings.min_queries)
            or self._recorder is not None
        ):
            batches = self._batches(common_attn_metadata, kinds)
            if any(batch.prefills is not None for batch in batches):
                # vLLM loads new weights into the same memory, of which no tensor's version tells.
                read_changed_again(self._sinks)
            if self._recorder is not None or any(batch.prefills is not None for batch in batches):
                metadata.blocksparse = batches
        return metadata

    def _batches(self, common: Any, kinds: Kinds) -> list[SplitMetadata]:
        """The batch of each kind of layers; those that are split alike share one."""
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
        own = {request: "mask" for request, ranges in pictures.items() if ranges}
        remaining, running = None, Requests.running.get()  # None in trial runs, which have no requests
        told = running and running.of_rows(len(lengths), getattr(common, "req_idx", None))
        if told is not None:
            remaining = [max(request.known - tokens, 0) for request, tokens in zip(told, lengths, strict=True)]
            own |= {row: TURNED_OFF for row, request in enumerate(told) if request.turned_off}
        elif running is not None and running.some_turned_off:
            dense = TURNED_OFF
        made: dict[Runs, SplitMetadata] = {}
        splits = kinds.splits(starts, lengths, dense=dense, own=own, remaining=remaining)
        if self._counters is not None:
            split = Split.sparsest(splits)
            self._counters.saw(split.prompts, split.queries)
        for kind, split in enumerate(splits):
            if split.sparse not in made:
                made[split.sparse] = SplitMetadata.of(
                    common,
                    split,
                    lengths,
                    page_size=self._page_size,
                    build=partial(self._build_rest, kind),
                    remaining=remaining,
                )
        return [made[split.sparse] for split in splits]

    def _build_rest(self, kind: int, rest: Any) -> Any:
        # Without sparse layers there is no kind, and all layers attend with the metadata of the whole batch.
        return self._of_rest[kind].build(0, rest) if self._of_rest else None


def _summary(impls: Iterable[SparsePrefill], how: Sequence[str]) -> str:
    """Which layers are sparse, from which sizes on and by what (`how`), and why others are not, in one line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for impl in impls:
        sparse = impl.attention is not None
        state = ("sparse", how[impl.kind]) if sparse else (f"dense ({impl.dense_because})", "")
        groups.setdefault(state, []).append(impl.layer)
    return "; ".join(f"{state} in layers {Runs.of(sorted(its))}{how}" for (state, how), its in groups.items())


@lru_cache(maxsize=64)
def _warn_once(reasons: str) -> None:
    _log.warning("blocksparse: no layer of this model goes sparse (%s), so the backend changes nothing", reasons)

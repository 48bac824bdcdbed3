"""What one engine of vLLM has: its settings, its pipelines, and a worker that says how much memory they take."""

from __future__ import annotations

import logging
from typing import Any, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.hosts.serving.layer import PagedAttention, Workspace
from blocksparse.hosts.serving.settings import KEY, Host, Served, Settings
from blocksparse.hosts.serving.warm import pays_from, warm
from blocksparse.hosts.serving.worth import Worth
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.observe.metrics import AuditGauges, PromptCounters

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say
HOST = Host("BLOCKSPARSE", "--additional-config")


NO_LAYER = "no layer of the model"  # but of one that drafts


@final
@frozen(eq=False)
class Engine:
    """The settings of an engine, and what its layers share. Each process of vLLM has one per model.

    Args:
        queries: at most, of a step.
        tokens: at most, of a request.
        page_size: tokens of a page of the cache.
    """

    settings: Settings
    queries: int
    tokens: int
    page_size: int = 16
    recorder: DensityRecorder | None = field(init=False)
    workspace: Workspace = field(init=False)
    counters: PromptCounters = field(factory=PromptCounters, init=False)
    gauges: AuditGauges | None = field(init=False)
    _warmed: set[tuple[object, ...]] = field(factory=set, init=False)

    @recorder.default
    def _new_recorder(self) -> DensityRecorder | None:
        return DensityRecorder() if self.settings.record else None

    @gauges.default
    def _new_gauges(self) -> AuditGauges | None:
        return None if self.settings.audit is None else AuditGauges(self.settings.audit)

    @workspace.default
    def _new_workspace(self) -> Workspace:
        return Workspace(self.tokens)

    @classmethod
    def there(cls, config: Any) -> Engine | None:
        """The engine of the layers that exist already. vLLM lists them in its config, so this needs no state."""
        for layer in config.compilation_config.static_forward_context.values():
            if isinstance(engine := getattr(getattr(layer, "impl", None), "engine", None), cls):
                return engine
        return None

    @classmethod
    def of(cls, config: Any) -> Engine:
        """The engine of the layers that exist already, or a new one.

        Raises:
            ConfigurationError: the configuration of this library does not fit.
        """
        return cls.there(config) or cls(
            Settings.of(config.additional_config, served_by(config), HOST),
            queries=int(config.scheduler_config.max_num_batched_tokens),
            tokens=int(config.model_config.max_model_len),
            page_size=int(getattr(config.cache_config, "block_size", None) or 16),
        )

    def attention(self, layer: int) -> PagedAttention | str:
        """The attention of a layer, or the reason why it is dense."""
        if layer >= len(self.settings.layers):
            return NO_LAYER
        pipeline = self.settings.layers[layer]
        if pipeline is None:
            return "no pipeline for this layer"
        return PagedAttention(pipeline, layer, self.recorder, self.workspace, self.gauges)

    def warm(self, attention: PagedAttention, worth: Worth, query: Tensor, out: Tensor) -> None:
        """Take memory and compile kernels for a pipeline, in the first of the layers that have it.

        Args:
            query, out: `[tokens, Hq, D]`. What is in `out` is overwritten.
        """
        plain = attention.softcap is None, attention.sinks is None
        kind = attention.pipeline, plain, worth.q.shape, worth.k.shape, query.dtype
        if kind not in self._warmed:
            self._warmed.add(kind)
            seconds = warm(
                attention, worth, self.settings, query, out, tokens=self.tokens, page_size=self.page_size
            )
            _log.info(
                "blocksparse: kernels of layer %d are ready after %.1f s; keys and values are gathered in %d MiB",
                attention.layer,
                seconds,
                self.workspace.nbytes >> 20,
            )

    def threshold(self, pipeline: LayerPipeline, worth: Worth) -> str:
        """From how many tokens on a request goes sparse, for the log."""
        queries = min(self.queries, self.tokens)
        least = pays_from(pipeline, worth, self.settings, queries=queries, tokens=self.tokens)
        if least is None:
            return f"no chunk of up to {queries} tokens, of requests of up to {self.tokens}, goes sparse"
        if least <= queries:
            return f"prompts of {least} tokens and more go sparse"
        return f"a chunk of {queries} tokens goes sparse from {least} tokens of its request on"


def served_by(config: Any) -> Served:
    """The properties of a VllmConfig that a configuration of this library must fit."""
    return Served.of(
        config.model_config.hf_text_config,
        ranks=int(config.parallel_config.tensor_parallel_size),
        draft_tokens=int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0),
    )


def is_configured(config: Any) -> bool:
    """Whether a VllmConfig says anything about this library."""
    return isinstance(config.additional_config, dict) and KEY in config.additional_config


def layer_of(name: str) -> int:
    """The index of the layer in a name such as `model.layers.3.self_attn.attn`; 0 if the name has no number."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


@final
class RecordReader:
    """For `--worker-extension-cls`: `llm.collective_rpc("blocksparse_table")` gives the table of each worker."""

    vllm_config: Any  # of the worker

    def blocksparse_table(self) -> str:
        """A line per layer: sparse calls, their density, and dense calls by reason."""
        engine = Engine.there(self.vllm_config)
        if engine is None:
            return "no layer has a pipeline: select --attention-backend BLOCKSPARSE"
        if engine.recorder is None:
            return """nothing is recorded: add "record": true to the configuration of blocksparse"""
        return engine.recorder.table()

    def blocksparse_counters(self) -> str:
        """Counts of sparse prompts, and of dense ones by reason, since the engine started."""
        engine = Engine.there(self.vllm_config)
        return "no layer has a pipeline" if engine is None else str(engine.counters)

    def blocksparse_audit(self) -> str:
        """A line per layer: audited calls, covered mass and error."""
        engine = Engine.there(self.vllm_config)
        if engine is None or engine.gauges is None:
            return """nothing is audited: add "audit": {} to the configuration of blocksparse"""
        return engine.gauges.audit.table()

    def blocksparse_clear(self) -> None:
        """Begin a new record."""
        engine = Engine.there(self.vllm_config)
        if engine is not None and engine.recorder is not None:
            engine.recorder.clear()

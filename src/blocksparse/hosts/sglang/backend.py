"""The SGLang backend named blocksparse: a native backend whose long prompts go sparse."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

from blocksparse.hosts.serving.layer import PagedAttention, Workspace
from blocksparse.hosts.serving.runs import Runs
from blocksparse.hosts.serving.settings import KEY as NAME
from blocksparse.hosts.serving.settings import ConfigurationError, Host, Served, Settings
from blocksparse.hosts.serving.warm import warm
from blocksparse.hosts.serving.worth import Kinds, Worth
from blocksparse.hosts.sglang.batch import SparseExtend, layer_is_dense_because
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.observe.metrics import AuditGauges

HOST = Host(NAME, "--json-model-override-args")
_log = logging.getLogger(__name__)


def backend(runner: Any) -> Any:
    """Make the backend that reads prompts in an engine.

    It is the native backend of this engine's decode, with one method replaced: `forward_extend`.

    Args:
        runner: SGLang's ModelRunner, whose model is loaded.
    """
    _check(runner)
    make = ATTENTION_BACKENDS[runner.decode_attention_backend_str]
    stock = make(runner)
    if runner.is_draft_worker:
        return stock  # a model that drafts has its own layers, which the configuration does not cover
    settings = Settings.of(
        runner.model_config.model_override_args,
        Served.of(runner.model_config.hf_text_config, ranks=int(runner.server_args.tp_size)),
        HOST,
    )
    before = getattr(runner, NAME, None)  # of the other half, where two batches overlap
    recorder = before.recorder if before is not None else DensityRecorder() if settings.record else None
    tokens = int(runner.model_config.context_len)
    layers = _layers(runner, settings, recorder, Workspace(tokens))
    kinds = _warmed(runner, settings, layers, tokens)
    prefill = SparseExtend(
        stock=stock.forward_extend,
        rests=[make(runner) for _ in kinds.pipelines],
        layers=layers,
        kinds=kinds,
        recorder=recorder,
        slots=runner.req_to_token_pool.req_to_token,
        cache=runner.token_to_kv_pool,
        write_loc=KVWriteLoc.for_layer,
    )
    setattr(runner, NAME, prefill)  # where the scheduler finds the record
    stock.forward_extend = prefill
    _log.info("blocksparse: %s", _summary(prefill.layers))
    return stock


def _check(runner: Any) -> None:
    """Refuse what would be wrong, rather than slow."""
    args = runner.server_args
    if runner.decode_attention_backend_str == NAME:
        raise ConfigurationError(
            f"{NAME} reads prompts and does not decode. Select it with --prefill-attention-backend {NAME}, and "
            "another one, which decodes, with --attention-backend."
        )
    refused = {
        "models with latent attention (MLA)": runner.use_mla_backend,
        "--attn-cp-size": args.attn_cp_size > 1,
        "--dcp-size": args.dcp_size > 1,
        "--enable-unified-memory": args.enable_unified_memory,
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "graphs of whole prefills (--cuda-graph-backend-prefill full)": check_cuda_graph_backend(
            Phase.PREFILL, Backend.FULL
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise ConfigurationError(
                f"--prefill-attention-backend {NAME} does not go with {what}. Leave one of the two out."
            )


def _layers(
    runner: Any, settings: Settings, recorder: DensityRecorder | None, workspace: Workspace
) -> dict[Any, PagedAttention | str]:
    """The attention of each layer, or the reason why it is dense."""
    layers: dict[Any, PagedAttention | str] = {}
    gauges = None if settings.audit is None else AuditGauges(settings.audit)
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            index = layer.layer_id
            pipeline = settings.layers[index] if index < len(settings.layers) else None
            reason = layer_is_dense_because(layer, dtype=runner.dtype, cache_dtype=runner.kv_cache_dtype)
            if reason is not None:
                layers[layer] = reason
            elif pipeline is None:
                layers[layer] = "no pipeline for this layer"
            else:
                layers[layer] = PagedAttention(pipeline, index, recorder, workspace, gauges)
    return layers


def _warmed(runner: Any, settings: Settings, layers: dict[Any, PagedAttention | str], tokens: int) -> Kinds:
    """The kinds of layers, once memory is taken, which SGLang does not measure, and kernels are compiled."""
    sparse = [(layer, attention) for layer, attention in layers.items() if not isinstance(attention, str)]
    first = next((layer for layer, _ in sparse), next(iter(layers), None))
    like = torch.empty((), dtype=runner.dtype, device=runner.device)
    heads = (1, 1, 1) if first is None else (first.tp_q_head_num, first.tp_k_head_num, first.qk_head_dim)
    worth = Worth.of(settings.dense_below, like, heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
    kinds = Kinds.of((attention.pipeline for _, attention in sparse), settings, worth)
    chunk = int(runner.server_args.chunked_prefill_size or 0)
    queries = chunk if chunk > 0 else int(runner.server_args.max_prefill_tokens)
    query = torch.zeros((min(queries, tokens), heads[0], heads[2]), dtype=runner.dtype, device=runner.device)
    out, done = torch.empty_like(query), set[LayerPipeline]()
    for _, attention in sparse:
        if attention.pipeline not in done:
            done.add(attention.pipeline)
            warm(attention, worth, settings, query, out, tokens=tokens, page_size=1)
    return kinds


def _summary(layers: dict[Any, PagedAttention | str]) -> str:
    """Which layers are sparse and why the others are not, in one line."""
    groups: dict[str, list[int]] = {}
    for layer, attention in layers.items():
        state = f"dense ({attention})" if isinstance(attention, str) else "sparse"
        groups.setdefault(state, []).append(layer.layer_id)
    return "; ".join(f"{state} in layers {Runs.of(sorted(found))}" for state, found in groups.items())

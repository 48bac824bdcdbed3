"""What vLLM asks of the classes before it runs them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.config.attention import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from blocksparse import a_shape
from blocksparse.hosts.serving.runs import Split
from blocksparse.hosts.serving.settings import Settings
from blocksparse.hosts.serving.worth import Kinds, Worth
from blocksparse.hosts.vllm import cpu, cuda, register
from blocksparse.hosts.vllm.engine import Engine
from blocksparse.observe.audit import Audit
from blocksparse.observe.metrics import AuditGauges, PromptCounters


@pytest.fixture
def _clean() -> Iterator[None]:
    yield
    for place in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN):
        place.clear_override()
    AttentionBackendEnum._member_map_.pop("BLOCKSPARSE", None)


@pytest.mark.usefixtures("_clean")
def test_the_name_is_one_of_vllms_own_place() -> None:
    register()
    register()
    config = AttentionConfig(backend="blocksparse", backend_per_kind={"full_attention": "BLOCKSPARSE"})
    assert config.backend is config.backend_per_kind["full_attention"] is AttentionBackendEnum.CUSTOM
    assert config.backend.get_class() is cuda.Backend
    assert AttentionBackendEnum[cuda.Backend.get_name()].get_class() is cuda.Backend  # layers ask by this name
    assert AttentionBackendEnum[cpu.Backend.get_name()].get_class() is cpu.Backend


@pytest.mark.usefixtures("_clean")
def test_another_plugin_keeps_its_place(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)  # vLLM's loggers do not propagate
    try:
        register()
    finally:
        logger.removeHandler(caplog.handler)
    assert "another plugin uses vLLM's slot for backends: another.plugin.Backend" in caplog.text
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.plugin.Backend"
    assert "BLOCKSPARSE" not in AttentionBackendEnum.__members__


@pytest.mark.parametrize(
    ("stock", "ours"),
    [("ALWAYS", "UNIFORM_BATCH"), ("UNIFORM_BATCH", "UNIFORM_BATCH"), ("NEVER", "NEVER")],
)
def test_graphs_are_kept_for_decoding_alone(monkeypatch: pytest.MonkeyPatch, stock: str, ours: str) -> None:
    builder = flash_attn.FlashAttentionMetadataBuilder
    monkeypatch.setattr(builder, "_cudagraph_support", AttentionCGSupport[stock])
    assert cuda.Builder.get_cudagraph_support(None, None) is AttentionCGSupport[ours]


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        ({}, []),
        ({"use_dcp": True}, ["DCP not supported"]),
        ({"use_pcp": True}, ["PCP not supported"]),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"use_batch_invariant": True}, ["batch invariance not supported"]),
    ],
)
def test_what_vllm_refuses_at_start(asked: dict[str, bool], reasons: list[str]) -> None:
    plain = dict.fromkeys(
        ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False
    )
    found = cuda.Backend.validate_configuration(
        **plain | asked,
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        device_capability=DeviceCapability(9, 0),
        attn_type="decoder",
    )
    assert found == reasons


def test_a_builder_that_changes_batches_leaves_them_dense() -> None:
    """As that of vLLM's layers with a sink of tokens does, whose lengths the host does not learn."""

    class Changing(cuda.Builder):
        def build(self, *given: Any, **options: Any) -> Any:
            return super().build(*given, **options)

    common = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 640]), seq_lens_cpu_upper_bound=torch.tensor([640]), causal=True
    )
    settings = Settings((a_shape(),), min_tokens=1, min_queries=2, dense_below=0)
    worth = Worth.of(0, torch.empty(()), heads=4, kv_heads=2, head_dim=16)
    builder = Changing.__new__(Changing)
    builder._page_size = 16
    (batch,) = builder._batches(common, Kinds.of([a_shape()], settings, worth))
    assert batch.reasons == Counter({"another builder changes batches": 1})
    assert batch.prefills is None


def layer_called(name: str, layers: dict[str, Any], *, decodes: bool = True) -> Any:
    """A layer of an engine with two layers, as vLLM has made it, among those that are there."""
    impl = cuda.Impl.__new__(cuda.Impl)
    impl.engine = Engine(Settings((a_shape(), a_shape())), queries=512, tokens=1024)
    impl._reason, impl._layers, impl.decodes = None, layers, decodes
    impl._softcap = impl._sinks = None
    layers[name] = SimpleNamespace(impl=impl)
    return impl


def test_layers_of_models_that_draft_stay_stock() -> None:
    """Their numbers begin anew, or go on where the model ends; those of an encoder say nothing of them."""
    layers: dict[str, Any] = {}
    layer_called("audio.layers.1.attn", layers, decodes=False)
    names = [
        "model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn",
        "draft_model.model.layers.0.self_attn.attn", "mtp.layers.1.self_attn.attn",
    ]  # fmt: skip
    impls = {name: layer_called(name, layers) for name in names}
    for name, impl in impls.items():
        impl.place(name, layers[name])
    assert [impl.dense_because for impl in impls.values()] == [None, None, *["no layer of the model"] * 3]


def test_prometheus_has_the_counters() -> None:
    def counted(name: str, attention: str) -> float:
        return REGISTRY.get_sample_value(name, {"attention": attention}) or 0.0

    counters, before = PromptCounters(), counted("blocksparse_prompts_total", "sparse")
    split = Split.of([0, 1, 101, 121], [50, 300, 20], min_tokens=100, min_queries=16)
    counters.saw(split.prompts, split.queries)
    assert counted("blocksparse_prompts_total", "sparse") - before == 1
    assert counted("blocksparse_prompt_tokens_total", "fewer than min_tokens") >= 20
    assert counted("blocksparse_prompts_total", "decode") == 0
    assert str(counters) == "prompts: 1 x fewer than min_tokens (20 tokens), 1 x sparse (100 tokens)"


def test_prometheus_has_what_audits_found() -> None:
    def gauge(name: str, **labels: str) -> float:
        found = REGISTRY.get_sample_value(f"blocksparse_audit_{name}", {"layer": "11"} | labels)
        assert isinstance(found, float)
        return found

    gauges, pipeline = AuditGauges(Audit(rows=16, every=2)), a_shape(sink=16, local=32, block=16)
    q, k, v = (torch.randn(1, heads, 160, 16) for heads in (4, 2, 2))
    asked = [gauges.wants(11) for _ in range(4)]
    assert sum(asked) == 2
    gauges.saw(11, trace := pipeline.trace(q, k, v))
    assert gauge("density") == pytest.approx(float(trace.density().mean()))
    (found,) = gauges.audit.layers()
    for name, estimate in (("covered_mass", found.covered_mass), ("error", found.error)):
        assert estimate is not None
        assert gauge(name, of="estimate") == pytest.approx(estimate.value)
        assert gauge(name, of="low") == pytest.approx(estimate.low)

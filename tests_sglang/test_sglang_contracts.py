"""SGLang's own classes, and what this library takes of them, without an engine."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from blocksparse.hosts.serving.runs import Runs
from blocksparse.hosts.sglang import ConfigurationError, backend, batch
from blocksparse.hosts.sglang.batch import batch_is_dense_because, layer_is_dense_because


def test_sglang_finds_the_plugin() -> None:
    load_plugins()
    assert "blocksparse" in attention_registry.ATTENTION_BACKENDS
    assert "blocksparse" in ATTENTION_BACKEND_CHOICES
    assert "sglang.srt.managers.scheduler.Scheduler.get_internal_state" in HookRegistry._patched
    assert "tp_worker" in inspect.getsource(Scheduler)
    assert "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new" in HookRegistry._patched
    assert next(iter(inspect.signature(ForwardBatch.init_new).parameters)) == "batch"
    assert "full_untruncated_fill_ids" in inspect.getsource(Req)


def test_the_method_that_is_replaced() -> None:
    names = ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"]
    assert list(inspect.signature(AttentionBackend.forward_extend).parameters) == names


def test_fields_of_a_batch() -> None:
    """All that are cut are there; one that SGLang adds may have to be cut too."""
    known = {x.name for x in fields(ForwardBatch)}
    assert {*batch._PER_REQUEST, *batch._LISTED, *batch._PER_TOKEN} <= known


def whole_batch() -> ForwardBatch:
    queries, contexts = [1, 30, 2], [9, 0, 5]
    return ForwardBatch(
        forward_mode=ForwardMode.MIXED,
        batch_size=3,
        input_ids=torch.arange(33),
        req_pool_indices=torch.tensor([4, 1, 2]),
        seq_lens=torch.tensor([10, 30, 7]),
        seq_lens_cpu=torch.tensor([10, 30, 7]),
        out_cache_loc=torch.arange(100, 133),
        seq_lens_sum=47,
        positions=torch.arange(33),
        extend_num_tokens=33,
        extend_seq_lens=torch.tensor(queries, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(contexts, dtype=torch.int32),
        extend_start_loc=torch.tensor([0, 1, 31], dtype=torch.int32),
        extend_seq_lens_cpu=queries,
        extend_prefix_lens_cpu=contexts,
        rids=["a", "b", "c"],
    )


def test_the_rest_is_a_batch_of_its_own() -> None:
    whole = whole_batch()
    part = batch.part_of(whole, Runs.of([0, 2]), Runs(((0, 1), (31, 33))))
    assert (part.batch_size, part.extend_num_tokens, part.seq_lens_sum) == (2, 3, 17)
    assert part.req_pool_indices.tolist() == [4, 2]
    assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == [10, 7]
    assert part.out_cache_loc.tolist() == [100, 131, 132]
    assert part.extend_start_loc.tolist() == [0, 1]
    assert part.extend_start_loc.dtype == torch.int32
    assert (part.extend_seq_lens_cpu, part.extend_prefix_lens_cpu, part.rids) == ([1, 2], [9, 5], ["a", "c"])
    assert whole.batch_size == 3
    assert whole.rids == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"forward_mode": ForwardMode.EXTEND}, None),
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, "target verify"),
        ({"extend_seq_lens_cpu": None}, "lengths that only the GPU knows"),
        ({"encoder_lens": torch.ones(3)}, "cross attention"),
        ({"cross_attention_custom_mask": torch.ones(3)}, "mask"),
        ({"multi_item_delimiter_indices": [torch.ones(1)]}, "mask"),
        ({"extend_seq_lens_cpu": [1, 30, 1]}, "padded batch"),
    ],
)
def test_batches_that_are_dense(changes: dict[str, Any], reason: str | None) -> None:
    whole = whole_batch()
    for name, value in changes.items():
        setattr(whole, name, value)
    assert batch_is_dense_because(whole, tokens=33) == reason


HEADS: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"sliding_window_size": 127}, "sliding window"),
        ({"logit_cap": 30.0}, "softcap"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "not causal"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "not causal"),
        ({"use_irope": True}, "chunked attention"),
        ({"pos_encoding_mode": "ALIBI"}, "position bias"),
        ({"head_dim": 512}, "head dim above 256"),
    ],
)
def test_layers_that_cannot_go_sparse(options: dict[str, Any], reason: str | None) -> None:
    layer = RadixAttention(**HEADS | options)
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    assert layer_is_dense_because(layer, dtype=bf16, cache_dtype=bf16) == reason
    assert layer_is_dense_because(layer, dtype=bf16, cache_dtype=fp8) == (reason or "KV cache in float8_e4m3fn")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--prefill-attention-backend .* does not go with {words}"):
        backend.backend(runner(**changes))


def test_latent_attention_is_refused() -> None:
    one = runner()
    one.use_mla_backend = True
    with pytest.raises(ConfigurationError, match=r"does not go with models with latent attention \(MLA\)"):
        backend.backend(one)


def test_a_model_that_drafts_keeps_the_stock_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = object()
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "torch_native", lambda _: stock)
    one = runner()
    one.is_draft_worker = True
    assert backend.backend(one) is stock


def runner(**changes: Any) -> Any:
    """As much of SGLang's ModelRunner as is looked at before the backend is made."""
    args = {
        "attn_cp_size": 1, "dcp_size": 1, "enable_unified_memory": False, "enable_deterministic_inference": False,
        "tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(
        decode_attention_backend_str="torch_native",
        use_mla_backend=False,
        is_draft_worker=False,
        server_args=SimpleNamespace(**args | changes),
    )

"""Small random models of every architecture in transformers' auto mappings, from configs that are shrunk alike."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
)

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
LARGEST = 20_000_000  # parameters of what counts as small
WORDS = 256
_SIZES: dict[int, str] = {
    64: "hidden_size n_embd d_model embed_dim word_embed_proj_dim attention_hidden_size embedding_size "
    "projection_dim mamba_d_ssm out_hidden_size d_embed dim",
    96: "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim expert_ffn_hidden_size "
    "ffn_hidden_size intermediate_size_mlp mlp_dim",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk n_mamba_heads "
    "linear_num_key_heads num_global_key_value_heads decoder_layers encoder_layers num_decoder_layers depth "
    "num_hidden_layers n_layer n_layers num_layers index_n_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads mamba_n_heads mamba_num_heads "
    "mamba_dt_rank linear_num_heads patch_size",
    16: "head_dim moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank qk_nope_head_dim "
    "v_head_dim mamba_head_dim mamba_d_head chunk_size mamba_chunk_size index_head_dim index_topk d_kv "
    "linear_head_dim global_head_dim attention_head_dim hidden_size_per_layer_input image_size mamba_headdim",
    8: "qk_rope_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size "
    "rotary_dim laurel_rank",
    1: "n_shared_experts n_group topk_group mamba_n_groups n_groups mamba_ngroups first_k_dense_replace "
    "bos_token_id decoder_start_token_id",
    0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers",
    512: "n_positions n_ctx max_position_embeddings max_sequence_length max_seq_len max_seq_length "
    "max_source_positions",
    48: "sliding_window attention_chunk_size window_size",
    WORDS: "vocab_size vocab_size_per_layer_input",
}
_HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_OTHER: dict[str, dict[str, Any]] = {  # what single architectures insist on
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "bailing_hybrid": {**_HYBRID, "num_key_value_heads": 4},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [96] * 6}
    | {"layer_types": ["sliding_attention", "full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "reformer": {"is_decoder": True},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_HYBRID, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"attention_head_dim": 32, "attention_hidden_size": 128, "num_hidden_layers": 4}
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "use_mem_eff_path": False,
    },
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_OTHER |= {
    f"{name}_text": {"rope_parameters": _SECTIONS}
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")
}
_OTHER |= {
    name: {"layer_types": ["linear_attention", "full_attention"]}
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
}
_OTHER["qwen4_exp_text"] |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_OTHER["qwen4_exp_text"] |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
_SMALL: dict[str, Any] = {name: value for value, names in _SIZES.items() for name in names.split()}
_SMALL |= {"dropout": 0.0, "attention_dropout": 0.0}


def architectures() -> dict[str, Any]:
    """The auto mappings that have decoders, models of two parts and models with pictures, by `model_type`."""
    found: dict[str, Any] = {}
    for mapping in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,  # before the decoders, which take some of these configs too
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        for kind in mapping._model_mapping:
            found.setdefault(kind, mapping)
    return dict(sorted(found.items()))


def others() -> dict[str, Any]:
    """Where transformers has every other model, by `model_type`: encoders, and what takes pictures or sound."""
    known = architectures().keys() | {"vits"}  # with random weights that speaks for hours
    return dict.fromkeys(sorted(MODEL_MAPPING._model_mapping.keys() - known), MODEL_MAPPING)


def small_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of few layers and small sizes, as far as its class has these names."""
    names = set(inspect.signature(kind.__init__).parameters)
    for owner in kind.__mro__:
        names |= set(getattr(owner, "__annotations__", {}))
    given = {name: _SMALL[name] for name in names & _SMALL.keys() if name not in kind.attribute_map}
    if "kv_lora_rank" in names and "num_key_value_heads" in given:  # keys are made of one latent for all heads
        given["num_key_value_heads"] = given["num_attention_heads"]
    for name, part in kind.sub_configs.items():
        if part.__name__ == "AutoConfig":  # what stands there by default
            part = type(getattr(kind(), name, None))
        if issubclass(part, PreTrainedConfig):
            given[name] = small_config(part).to_dict()
    return kind(**given | _OTHER.get(kind.model_type, {}))


def small_model(kind: str) -> Any:
    """A random model, with weights of unit gain, so that its attention is far from uniform."""
    mapping = architectures().get(kind, MODEL_MAPPING)
    config = small_config(mapping._load_attr_from_module(kind, mapping._config_mapping[kind]))
    build = mapping[type(config)]
    build = build[0] if isinstance(build, tuple) else build
    with torch.device("meta"):
        size = sum(x.numel() for x in build(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size // 1_000_000} million parameters")
    model, generator = build(config).eval(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model

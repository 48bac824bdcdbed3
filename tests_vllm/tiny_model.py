"""Folders with tiny models, whose weights are random and large enough that every token depends on its context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2,
}  # fmt: skip


def llama(folder: Path, **options: Any) -> Path:
    """Save a Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **options,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def gemma(folder: Path, *kinds: str) -> Path:
    """Save a Gemma 2 whose layers all have a softcap; those of the kind "sliding_attention" have a window too."""
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, sliding_window=64, layer_types=list(kinds))
    model = Gemma2ForCausalLM(config).eval()
    model.get_input_embeddings().weight.data.mul_(0.1)  # or each token would be followed by itself
    model.save_pretrained(folder)
    return folder


def gpt_oss(folder: Path) -> Path:
    """Save a GPT-OSS of two layers with attention sinks, the first of which has a window."""
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, sliding_window=64, num_local_experts=2, num_experts_per_tok=1)
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    model.save_pretrained(folder)
    return folder


def adapter(folder: Path) -> Path:
    """Save a LoRA adapter of rank 8 for the attention of `llama`, as PEFT does."""
    torch.manual_seed(1)
    hidden, of_heads = SIZES["hidden_size"], {"q": 4, "k": 2, "v": 2}
    weights = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, heads in of_heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{at}.lora_A.weight"] = 0.2 * torch.randn(8, hidden)
            weights[f"{at}.lora_B.weight"] = 0.2 * torch.randn(heads * SIZES["head_dim"], 8)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [f"{x}_proj" for x in of_heads]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

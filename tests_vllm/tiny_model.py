"""Folders with tiny models, whose weights are random and large enough that every token depends on its context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

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


def gemma(folder: Path) -> Path:
    """Save a Gemma 2 of two layers: the first has a window, and both a softcap."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES,
        sliding_window=64,
    )
    Gemma2ForCausalLM(config).eval().save_pretrained(folder)
    return folder

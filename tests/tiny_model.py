"""A model that knows nothing, and its tokenizer: made in a moment, without any file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def byte_tokenizer() -> Any:
    """One token per byte; needs no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def tiny_llama(seed: int = 0, **other: Any) -> Any:
    """A random Llama with two layers of four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SIZES | other)).eval()


def tiny_gemma2(**other: Any) -> Any:
    """A random Gemma 2 of the same sizes, whose softcap sdpa does not know; its first layer has a window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES | {"head_dim": 16, "sliding_window": 64} | other)).eval()


def save_tiny(folder: Path, tokenizer: Any, model: Any = None) -> None:
    """A tiny Llama, or another model, saved with its tokenizer."""
    (model or tiny_llama(vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

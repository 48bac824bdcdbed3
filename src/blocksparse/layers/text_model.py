"""The parts of a language model of transformers by one name, whatever its family calls them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def text_config(network: Any) -> Any:
    """The config of the text model, which multimodal models keep inside of their own."""
    return network.config.get_text_config(decoder=True)


def base_model(network: Any) -> Any:
    """The model below the head, which returns a `last_hidden_state` `[B, N, C]`."""
    return network.base_model


def logits_of(network: Any, hidden: Tensor) -> Tensor:
    """Logits `[..., V]` of hidden states `[..., C]`, in fp32, with the cap that Gemma has on them."""
    logits: Tensor = network.get_output_embeddings()(hidden).float()
    cap = getattr(text_config(network), "final_logit_softcapping", None)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

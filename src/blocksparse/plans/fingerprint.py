"""What tells one model from another: its shape, and a few numbers of every weight."""

from __future__ import annotations

import hashlib
from typing import Any, final

import torch
from attrs import frozen

from blocksparse.layers.text_model import text_config

_SAMPLES = 32  # numbers of each weight


@final
@frozen
class Fingerprint:
    """The model that a plan was made for."""

    name: str  # of the folder or the hub, for people; not compared
    type: str
    layers: int
    heads: int
    kv_heads: int
    weights: str  # a hash of some numbers of every weight

    @classmethod
    def of(cls, network: Any) -> Fingerprint:
        """The fingerprint of a transformers model; the same on every device."""
        config, digest = text_config(network), hashlib.sha256()
        for name, weight in network.named_parameters():
            flat = weight.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to("cpu", torch.float32)
            digest.update(f"{name} {tuple(weight.shape)} ".encode() + some.numpy().tobytes())
        heads = int(config.num_attention_heads)
        return cls(
            name=str(getattr(network.config, "_name_or_path", "") or type(network).__name__)
            .rstrip("/")
            .split("/")[-1],
            type=str(config.model_type),
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            weights=digest.hexdigest()[:32],
        )

    def difference(self, other: Fingerprint) -> str | None:
        """In what the models differ, as text, or None."""
        for what in ("type", "layers", "heads", "kv_heads"):
            if getattr(self, what) != getattr(other, what):
                return f"{what.replace('_', ' ')}: {getattr(self, what)} and {getattr(other, what)}"
        return None if self.weights == other.weights else "weights"

"""`Engine`: what all layers of one vLLM engine share."""

from __future__ import annotations

from typing import Any, final

from attrs import field, frozen

from blocksparse.integrations.density_recorder import DensityRecorder
from blocksparse.integrations.serving.layer import LayerAttention
from blocksparse.integrations.serving.settings import KEY, Host, Served, Settings

HOST = Host("BLOCKSPARSE", "--additional-config")


@final
@frozen(eq=False)
class Engine:
    """The settings of an engine, and its record. Each process of vLLM has one per model."""

    settings: Settings
    recorder: DensityRecorder | None = field(init=False)

    @recorder.default
    def _new_recorder(self) -> DensityRecorder | None:
        return DensityRecorder() if self.settings.record else None

    @classmethod
    def there(cls, config: Any) -> Engine | None:
        """That of the layers which are there already. vLLM lists them in its config, so this needs no state."""
        for layer in config.compilation_config.static_forward_context.values():
            if isinstance(engine := getattr(getattr(layer, "impl", None), "engine", None), cls):
                return engine
        return None

    @classmethod
    def of(cls, config: Any) -> Engine:
        """That of the layers which are there already, or a new one.

        Raises:
            ConfigurationError: the configuration of this library does not fit.
        """
        return cls.there(config) or cls(Settings.of(config.additional_config, served_by(config), HOST))

    def attention(self, layer: int) -> LayerAttention | str:
        """What attends in a layer, or the reason why it is dense."""
        if layer >= len(self.settings.layers):
            return "no layer of the model"  # but of one that drafts
        pipeline = self.settings.layers[layer]
        return "no pipeline for this layer" if pipeline is None else LayerAttention(pipeline, layer, self.recorder)


def served_by(config: Any) -> Served:
    """What of a VllmConfig a configuration of this library has to fit."""
    return Served.of(
        config.model_config.hf_text_config,
        ranks=int(config.parallel_config.tensor_parallel_size),
        draft_tokens=int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0),
    )


def is_configured(config: Any) -> bool:
    """Whether a VllmConfig says anything about this library."""
    return isinstance(config.additional_config, dict) and KEY in config.additional_config


def layer_of(name: str) -> int:
    """The index of the layer in a name such as `model.layers.3.self_attn.attn`; 0 if there is no number in it."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)

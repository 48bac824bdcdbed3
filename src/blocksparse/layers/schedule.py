"""`Schedule`, a pipeline for each layer, and the layers of a text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import is_whole, shown, size, whole
from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, named_twice
from blocksparse.pipeline import Pipeline


def text_config(network: Any) -> Any:
    """The config of the text model, which multimodal models keep inside theirs."""
    return network.config.get_text_config(decoder=True)


def setting(config: Any, name: str) -> Any:
    """A setting of a transformers config, None if it has none; of layers that differ in it, a list by layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses one value for all layers
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def heads_of(config: Any) -> tuple[int, int]:
    """The number of query heads and of KV heads in a layer; the most, where layers differ."""

    def most(name: str) -> int:
        found = setting(config, name)
        return int(max(found) if isinstance(found, list) else found or 0)

    heads = most("num_attention_heads")
    return heads, most("num_key_value_heads") or heads


def base_model(network: Any) -> Any:
    """The model below the head, which returns a `last_hidden_state` `[B, N, C]`."""
    return network.base_model


def logits_of(network: Any, hidden: Tensor) -> Tensor:
    """Logits `[..., V]` of hidden states `[..., C]`, in fp32, with the cap that Gemma has on them."""
    logits: Tensor = network.get_output_embeddings()(hidden).float()
    cap = getattr(text_config(network), "final_logit_softcapping", None)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


LayerPipeline = AnyPipeline | HeadGroups
"""What attends in one layer."""


def schedule_of(pipeline: object) -> Schedule:
    """A schedule, made from a schedule or from one pipeline for every layer."""
    if isinstance(pipeline, Schedule):
        return pipeline
    if not isinstance(pipeline, Pipeline | HeadGroups):
        hint = "Schedule(None, layers={...}) attends sparsely in single layers."
        if isinstance(pipeline, str):
            hint = "Presets are functions of blocksparse, to be called, as in attach(model, auto())."
        raise TypeError(f"'pipeline' must be a Pipeline, HeadGroups or a Schedule: {shown(pipeline)}. {hint}")
    return Schedule(pipeline)


def _layers(layers: Mapping[int, LayerPipeline | None]) -> Mapping[int, LayerPipeline | None]:
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"'layers' must be a mapping of layers to pipelines: {type(layers).__name__}. Write {{0: pipeline}}."
        )
    return {whole(layer): attention for layer, attention in layers.items()}


def _indices(dense: Sequence[int]) -> Sequence[int]:
    if not isinstance(dense, Sequence) or not all(map(is_whole, dense)):
        raise TypeError(f"'dense' must be a sequence of whole numbers: {shown(dense)}. Write [0, 1], say.")
    return tuple(map(whole, dense))


def _groups(groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Sequence) and all(map(is_whole, group)) for group in groups
    ):
        raise TypeError(
            f"'same_choice' must be a sequence of groups of layers, as ((2, 3), (4, 5)): {shown(groups)}. "
            "Write two brackets for one group."
        )
    return tuple(tuple(map(whole, group)) for group in groups)


def _check_layer(where: str, attention: object) -> None:
    if attention is not None and not isinstance(attention, Pipeline | HeadGroups):
        raise TypeError(
            f"{where} must be a Pipeline, HeadGroups or None (dense): {shown(attention)}. "
            "Presets return Pipelines."
        )


@final
@frozen(cache_hash=True)
class Schedule:
    """A pipeline for each layer of a model. None is dense; negative indices count from the last layer.

        Schedule(pbs_attn(0.9), dense=(0, 1, -1))
        Schedule(pbs_attn(0.9), layers={3: pbs_attn(0.95), 4: HeadGroups({(0, 1): mean_pooling(), (2,): None})})

        Schedule(pbs_attn(0.9), dense=(0, 1), same_choice=((2, 3, 4), (5, 6, 7)))

    Args:
        default: the pipeline of every layer that is not named.
        layers: the pipelines of single layers, by index.
        dense: the indices of dense layers. The same as None for them in `layers`.
        same_choice: groups of layers that have one pipeline, equal heads and one window, in the order in which
            they run. The first of a group chooses blocks in each forward call, and the others attend to the same
            blocks and score none (Kascade, arXiv 2512.16391). On several GPUs, the first on each of them chooses.
            `attach` of transformers and of diffusers does so.
    """

    default: LayerPipeline | None = field()
    layers: Mapping[int, LayerPipeline | None] = field(
        factory=dict, converter=_layers, kw_only=True, eq=lambda layers: frozenset(layers.items())
    )
    dense: Sequence[int] = field(default=(), converter=_indices, kw_only=True)
    same_choice: Sequence[Sequence[int]] = field(default=(), converter=_groups, kw_only=True)

    @default.validator
    def _check_default(self, _: object, default: object) -> None:
        _check_layer("'default'", default)

    @layers.validator
    def _check_layers(self, _: object, layers: Mapping[Any, Any]) -> None:
        for layer, attention in layers.items():
            if not is_whole(layer):
                raise TypeError(
                    f"'layers' must have whole numbers as keys: {shown(layer)}. Convert them with int()."
                )
            _check_layer(f"layer {shown(layer)} of 'layers'", attention)

    @dense.validator
    def _check_dense(self, _: object, dense: Sequence[int]) -> None:
        if twice := named_twice((*self.layers, *dense)):
            raise ValueError(
                f"'layers' and 'dense' must name each layer once in all, but name these more than once: {twice}. "
                "Remove one."
            )

    @same_choice.validator
    def _check_same_choice(self, _: object, groups: Sequence[Sequence[int]]) -> None:
        if alone := [group for group in groups if len(group) < 2]:
            raise ValueError(f"a group of 'same_choice' must have at least 2 layers: {alone[0]}. Leave it out.")
        if twice := named_twice(layer for group in groups for layer in group):
            raise ValueError(
                f"'same_choice' must name each layer once in all, but names these more than once: {twice}. "
                "Remove one."
            )

    def resolve(self, layers: int) -> tuple[LayerPipeline | None, ...]:
        """The attention of each layer of a model with `layers` layers.

        Raises:
            TypeError, ValueError: `layers` is not a whole number, at least 1. Or the schedule names a layer that
                the model does not have, or names one twice, once from either end.
        """
        size.check(layers=layers)
        named = {**self.layers, **dict.fromkeys(self.dense)}
        for layer in named:
            if not -layers <= layer < layers:
                raise ValueError(f"there is no layer {layer}: the model has {layers}, 0 to {layers - 1}")
        if twice := named_twice(layer % layers for layer in named):
            raise ValueError(
                f"these of the {layers} layers are named twice, once from the start and once from the end: "
                f"{twice}. Remove one."
            )
        by_layer = {layer % layers: attention for layer, attention in named.items()}
        return tuple(by_layer.get(layer, self.default) for layer in range(layers))

    def choosers(self, layers: int) -> tuple[int, ...]:
        """The layer that selects blocks for each layer of a model with `layers` layers: usually itself.

        Raises:
            TypeError, ValueError: as in `resolve`. Or layers of `same_choice` are dense, have several pipelines or
                `HeadGroups`, or are not named in the order in which they run.
        """
        by_layer, choosers = self.resolve(layers), list(range(layers))
        for group in self.same_choice:
            for layer in group:
                if not -layers <= layer < layers:
                    raise ValueError(f"there is no layer {layer}: the model has {layers}, 0 to {layers - 1}")
            first, *others = members = [layer % layers for layer in group]
            if members != sorted(set(members)):
                raise ValueError(
                    f"a group of 'same_choice' must name layers in the order in which they run: {group}. "
                    "Sort them."
                )
            for layer in members:
                if not isinstance(by_layer[layer], Pipeline) or by_layer[layer] != by_layer[first]:
                    raise ValueError(
                        f"the layers {group} of 'same_choice' must have one pipeline, and layer {layer} has "
                        f"{shown(by_layer[layer])}. Give each the same."
                    )
                if choosers[layer] != layer:
                    raise ValueError(
                        f"layer {layer} is in two groups of 'same_choice', named from the start and the end"
                    )
            for layer in others:
                choosers[layer] = first
        return tuple(choosers)

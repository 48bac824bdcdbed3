"""`attach` runs the prefill of a transformers model through a pipeline, until its `Attachment` is detached."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from enum import StrEnum
from itertools import chain
from typing import Any, Final, TypeAlias, cast, final
from uuid import uuid4
from weakref import finalize, ref

import torch
from attrs import field, frozen
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blocksparse.check.per_head import read_again
from blocksparse.check.validators import a, flag, optional, size, whole
from blocksparse.hosts.transformers.adapter import SDPA, LayerAttention, Outcomes, SdpaInPlace, TransformersAdapter
from blocksparse.hosts.transformers.call import layer_of
from blocksparse.hosts.transformers.mask_request import (
    asks_for_its_function,
    attends_several_times,
    uses_own_masks,
)
from blocksparse.hosts.transformers.own_function import eager_of, forwards_of, is_attention, refused_of
from blocksparse.hosts.transformers.prompt_mask import KnownPrompt, PrefillInPlace
from blocksparse.layers.head_groups import Attention
from blocksparse.layers.reused_mask import ReusedMask, shared
from blocksparse.layers.schedule import LayerPipeline, Schedule, schedule_of, text_config
from blocksparse.observe.audit import Audit, AuditedAttention
from blocksparse.observe.density_recorder import DensityRecorder


class _Ending:
    before: str | None  # the name that it replaced
    owner: str  # the key of its attachment

    def __copy__(self) -> Any:
        return self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.before, memo)

    def __reduce_ex__(self, proto: object) -> tuple[Any, ...]:
        return deepcopy, (self.before,)


@final
class _Text(_Ending, str):
    pass


class _Member(_Ending, StrEnum):  # each name is the only member of its own enumeration
    def startswith(self, *asked: Any) -> bool:  # which PyTorch 2.11 compiles if it is written in Python
        return self.value.startswith(*asked)


EndingName: TypeAlias = _Text | _Member

# torch.compile must take the name for a constant. Of strings with attributes, PyTorch 2.11 does so with members of
# enumerations alone, and later releases with all others.
_ENUMERATED: Final = torch.__version__.startswith("2.11.")


def ending_name(name: str, before: str | None, owner: str) -> EndingName:
    """`name`, which the attachment `owner` put in the place of `before`."""
    made: EndingName = cast("Any", _Member)("Name", {"ONLY": name})["ONLY"] if _ENUMERATED else _Text(name)
    made.before, made.owner = before, owner
    return made


_PREFIX = "blocksparse-"


@final
@frozen(eq=False)
class Attachment:
    """A pipeline in a model, under its own name in transformers' registries, until `detach()`.

    A model may have several attachments. The latest one is in use, and they must be detached in reverse order. A
    deep copy or a pickle of the model has no pipeline; it attends as the model did before. When the model is
    garbage-collected, its attachments end too.
    """

    key: str
    _before: tuple[tuple[Any, str | None], ...] = field(repr=False)  # every config and the name that it had before
    _end: finalize[..., Any] = field(repr=False)
    _prompt: KnownPrompt = field(repr=False)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        configs: Sequence[Any],
        adapter: TransformersAdapter,
        *,
        continuous_batching: bool,
    ) -> Attachment:
        """Register the functions of `adapter` and let all `configs` name them, until the end."""
        key = _PREFIX + uuid4().hex
        before = tuple((config, config._attn_implementation) for config in configs)
        places: list[SdpaInPlace | PrefillInPlace] = []
        end = finalize(model, _restore, key, before, places, adapter.outcomes)
        end.atexit = False
        try:
            if continuous_batching:
                places.append(SdpaInPlace.put(adapter))
            else:
                AttentionInterface.register(key, adapter.attend)
                AttentionMaskInterface.register(key, adapter.mask)
                places.append(PrefillInPlace.put(adapter.modules, adapter.prompt))
            for config, name in before:
                # The public setter would also set sub-configs.
                config._attn_implementation_internal = ending_name(SDPA if continuous_batching else key, name, key)
        except BaseException:
            end()
            raise
        return cls(key, before, end, adapter.prompt)

    def prompt(self, tokens: int) -> AbstractContextManager[None]:
        """Tell in a `with` block how many tokens the prompt has that calls of the model read in chunks.

            with attachment.prompt(len(tokens)):
                for chunk in tokens.split(2048):
                    model(chunk, past_key_values=cache)

        `LastQueries`, and with it `auto`, then means the last queries of the prompt; elsewhere those of each call.
        `generate(prefill_chunk_size=...)` needs no such block. Calls inside torch.compile do not see it.

        Args:
            tokens: the tokens of the prompt, padding and what the cache holds before it included.

        Raises:
            TypeError, ValueError: `tokens` is not a whole number, at least 1.
        """
        size.check(tokens=tokens)
        return self._prompt.of(whole(tokens))

    def detach(self) -> None:
        """Give the model its previous attention back and delete the name. A second call does nothing.

        A config that was set to something else in the meantime is left as it is. No call of the model may be
        running, because its later layers would use another attention function than its earlier ones.

        Raises:
            RuntimeError: the same model still has a later attachment.
        """
        for config, _ in self._before if self._end.alive else ():
            if (owner := _owner(config)) not in (None, self.key):
                raise RuntimeError(f"{self.key} lies below a later attachment. Detach that one ({owner}) first.")
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _owner(config: Any) -> str | None:
    """The key of the attachment whose name a config has, or None."""
    return getattr(config._attn_implementation, "owner", None)


def _restore(
    key: str,
    before: Sequence[tuple[Any, str | None]],
    places: Sequence[SdpaInPlace | PrefillInPlace],
    outcomes: Outcomes,
) -> None:
    for config, name in before:
        if _owner(config) == key:
            config._attn_implementation_internal = name
    for place in places:
        place.end()
    # transformers can register a name for the class, but can delete it only from an instance.
    AttentionInterface._global_mapping.pop(key, None)
    AttentionMaskInterface._global_mapping.pop(key, None)
    outcomes.tell()


def attach(
    model: nn.Module,
    pipeline: LayerPipeline | Schedule,
    *,
    min_tokens: int = 512,
    min_queries: int = 64,
    recorder: DensityRecorder | None = None,
    audit: Audit | None = None,
    continuous_batching: bool = False,
    min_window: int | None = 2048,
) -> Attachment:
    """Run the prefill of `model` through `pipeline`, and everything else through exact dense attention.

    This lasts until `detach()` is called, or for a `with` block:

        with attach(model, pbs_attn()):
            model.generate(...)

    Args:
        model: a transformers model. torch.compile or PEFT may be around it.
        pipeline: a pipeline for every layer, or a `Schedule` by `layer_idx`.
        min_tokens: shorter prompts, context included, stay dense. Tokens that the cache of a layer with a window
            has dropped count too, except in continuous batching.
        min_queries: prompts with fewer queries at once stay dense. Decoding always does.
        recorder: gets a record of what each call did. If None, nothing is recorded.
        audit: compares a few random queries of some sparse calls with dense attention. None for no audit.
        continuous_batching: attach to the calls of `generate_batch` instead, and to no others. transformers
            accepts only its own names there. So "sdpa" names the pipeline for this model.
        min_window: layers with a shorter sliding window are dense within it. This holds if it hides a part of the
            prompt. None means all windows. Layers whose executor does not support windows are dense too.

    Raises:
        TypeError: `model` does not hold exactly one transformers model, or `pipeline` is not a pipeline.
        ValueError: no attention of the model asks transformers which function to call, or a part of the model does
            arithmetic on masks. Or a function that attends or makes masks is not one of transformers. Or the model
            lacks a layer that the schedule names, or shares one attention among its layers. Or the schedule has a
            pipeline for a layer without attention, or one choice for layers of several kinds, as with and without
            a window, or that attend several times. Or transformers is too old for `continuous_batching`.
    """
    model = _inside(model)
    read_again()  # sinks that were written to since, which not every write says of itself
    schedule = schedule_of(pipeline)
    optional(a(DensityRecorder)).check(recorder=recorder)
    optional(a(Audit)).check(audit=audit)
    min_tokens, min_queries = whole(min_tokens), whole(min_queries)
    flag.check(continuous_batching=continuous_batching)
    size.check(min_tokens=min_tokens, min_queries=min_queries)
    optional(size).check(min_window=min_window)
    outcomes, configs = Outcomes(type(model).__name__, recorder), configs_of(model)
    layers = {
        layer: LayerAttention(
            attention if attention is None or audit is None else AuditedAttention(attention, layer, audit),
            layer, min_tokens, min_queries, min_window, outcomes,
            attention.begin if isinstance(attention, ReusedMask) else None,
        )
        for layer, attention in _layers_of(schedule, model).items()
    }  # fmt: skip
    eager = frozenset(id(x) for x in (*model.modules(), *configs) if _attends_by_itself(x))
    refused = {
        id(module): refused_of(type(module), eager=id(module) in eager)
        for module in model.modules()
        if asks_for_its_function(type(module))
    }
    adapter = TransformersAdapter(
        layers, frozenset(map(id, model.modules())), eager, refused, outcomes, ref(model)
    )
    _refuse_own_masks(model)
    _refuse_own_functions(configs, model)
    _refuse_shared(configs, model)
    return Attachment.of(model, configs, adapter, continuous_batching=continuous_batching)


def _attends_by_itself(module: Any) -> bool:
    """Whether a module calls its own function, which transformers names "eager", below all attachments.

    A config answers for its modules.
    """
    name = getattr(getattr(module, "config", module), "_attn_implementation", None)
    while isinstance(name, EndingName):
        name = name.before
    return name == "eager"


def _inside(model: nn.Module) -> PreTrainedModel:
    """The transformers model that `model` is or wraps."""
    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"'model' must be a transformers.PreTrainedModel: {type(model).__name__}. The order is "
            "attach(model, pipeline)."
        )
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    within = {id(part) for outer in models for part in outer.modules() if part is not outer}
    outermost = [part for part in models if id(part) not in within]
    if len(outermost) != 1:
        raise TypeError(
            f"'model' must be a transformers.PreTrainedModel or hold one: {type(model).__name__} holds "
            f"{len(outermost)}. Models of diffusers have hosts.diffusers.attach."
        )
    return outermost[0]


def _refuse_own_masks(model: PreTrainedModel) -> None:
    """Refuse a model that does arithmetic on masks: those of an attached model are bools, and made late."""
    for module in {type(x): x for x in model.modules() if not isinstance(x, PreTrainedModel)}:
        if (reader := uses_own_masks(module)) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot change its attention function: its {reader} does arithmetic on "
                "the mask, which has no numbers for a pipeline. Call it yourself, in its attention's place."
            )


def _refuse_own_functions(configs: Iterable[Any], model: PreTrainedModel) -> None:
    """Refuse a model with a function of somebody else: it may add a bias, say, and would not run."""
    for config in configs:
        name = config._attn_implementation
        _refuse_own(model, f"attends by {name!r}", ALL_ATTENTION_FUNCTIONS.get(name))
        _refuse_own(model, f"makes its masks by {name!r}", ALL_MASK_ATTENTION_FUNCTIONS.get(name))
    for module in model.modules():
        kind = type(module)
        if _attends_by_itself(module) and asks_for_its_function(kind):
            does, written = f"attends by the eager function of {kind.__name__}", _written_in(module)
            # Of the model's code, if nobody has put another one in its place.
            _refuse_own(model, does, eager_of(module), *map(_package, written))
            mine = [name for name in written if _package(name) != "transformers"]
            if mine and not is_attention(module):
                raise _replaced(model, does, mine[0])


def _written_in(module: nn.Module) -> list[str]:
    """The Python modules of a class of attention and of its forward, which may have been put in since."""
    return [type(module).__module__, *(str(x.__globals__.get("__name__")) for x in forwards_of(module))]


def _refuse_own(model: PreTrainedModel, does: str, function: Any, *known: str) -> None:
    """Refuse a function that is neither of transformers nor of a package that is `known`, or that wraps one."""
    while function is not None and "/" not in does:  # kernels of the Hub have one, and do what transformers does
        function = getattr(function, "func", function)  # of a functools.partial
        # functools.wraps copies the name of the module too, so it is that of the code which counts.
        module = getattr(function, "__globals__", {}).get("__name__") or str(function.__module__)
        if _package(module) not in ("transformers", "blocksparse", "torch", *known):
            raise _replaced(model, does, module)
        function = getattr(function, "__wrapped__", None)


def _replaced(model: PreTrainedModel, does: str, module: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} {does}, a function of {module} that a pipeline would replace. If "
        "the model attends alike without it, take it out, or set_attn_implementation() to another name first."
    )


def _package(module: str) -> str:
    return module.partition(".")[0]


def configs_of(model: PreTrainedModel) -> list[Any]:
    """The configs of all attention that asks for its function, and of models around it, which make its masks."""
    asking = [module for module in model.modules() if asks_for_its_function(type(module))]
    if not asking:
        raise ValueError(
            f"{type(model).__name__} cannot change its attention function: none of its modules asks "
            "transformers' AttentionInterface for one. Call the pipeline yourself, in its attention's place."
        )
    ids = set(map(id, asking))
    around = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and any(id(module) in ids for module in part.modules())
    ]
    found = {
        id(config): config for part in [*around, *asking] if (config := getattr(part, "config", None)) is not None
    }
    return list(found.values())


def _refuse_shared(configs: Iterable[Any], model: PreTrainedModel) -> None:
    """Refuse to attach if another model shares a config and has a pipeline: one config names one pipeline.

    Models with layers in common share the config of these. A model and a part of it are one model.
    """
    for config in configs:
        below = AttentionInterface._global_mapping.get(config._attn_implementation)
        adapter = getattr(below, "__self__", None)
        other = adapter.model() if isinstance(adapter, TransformersAdapter) else None
        if (
            other is not None
            and not any(x is other for x in model.modules())
            and not any(x is model for x in other.modules())
        ):
            raise ValueError(
                f"{type(model).__name__} shares its {type(config).__name__} with another model that has a "
                "pipeline. Give each model its own config, copy.deepcopy(config), and its own layers."
            )


def _modules(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """The class and its bases that are modules."""
    return (base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)


def _in_several_layers(model: PreTrainedModel) -> Iterator[type[nn.Module]]:
    """The classes of attention that stands in several layers, or that does not tell its layers by one number."""
    first: dict[int, list[str]] = {}
    stacks: dict[Hashable, tuple[int, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kind, parts = type(module), path.split(".")
        numbers = [part for part in parts if part.isdigit()]
        if asks_for_its_function(kind):
            told = layer_of(module) < 0 and "layer_idx" in inspect.signature(kind.forward).parameters
            if told or first.setdefault(id(module), numbers) != numbers:
                yield kind
            # Two stacks of one decoder that both count from 0 run by turns (HRM-Text). One of Idefics sees images.
            crosses = model.config.is_encoder_decoder or getattr(module, "is_cross_attention", False)
            if numbers and layer_of(module) >= 0 and not crosses:
                layer = parts[: parts.index(numbers[0]) + 1]
                same = kind, layer_of(module), id(getattr(module, "config", None))
                other, its = stacks.setdefault(same, (id(module), layer))
                if other != id(module) and its != layer:
                    yield kind


def _layers_of(schedule: Schedule, model: PreTrainedModel) -> dict[int, Attention | None]:
    """The attention of every layer of the model, by `layer_idx`, and of modules without a layer (-1)."""
    layers: dict[int, Attention | None] = {}
    layers.update(dict.fromkeys((-1, *map(layer_of, model.modules())), schedule.default))
    if schedule.layers or schedule.dense or schedule.same_choice:
        if (kind := next(_in_several_layers(model), None)) is not None:
            raise ValueError(
                f"a Schedule cannot name layers of {type(model).__name__}: they share one {kind.__name__}, "
                "which does not say in which layer it attends. Attach one pipeline to all of them."
            )
        count: int | None = getattr(text_config(model), "num_hidden_layers", None)
        if count is None:
            raise ValueError(
                "a Schedule that names layers needs their number, and "
                f"{type(model.config).__name__} has no num_hidden_layers"
            )
        layers.update(enumerate(shared(schedule, count)))
        # A class may leave its forward to a base, and a stage of a model over several ranks has some layers only.
        attending = {layer_of(x) for x in model.modules() if any(map(asks_for_its_function, _modules(type(x))))}
        others = {layer_of(x) for x in model.modules()} - attending
        sparse = (layer for layer, attention in schedule.layers.items() if attention is not None)
        for named in (*sparse, *chain.from_iterable(schedule.same_choice)):
            if named % count in others:
                raise ValueError(
                    f"layer {named} of {type(model).__name__} has no attention that a pipeline could replace. "
                    f"Leave it out of the Schedule. These layers have: {sorted(attending - {-1})}."
                )
        grouped = {layer % count for layer in chain.from_iterable(schedule.same_choice)}
        for kind in {type(x) for x in model.modules() if grouped and layer_of(x) in grouped}:
            if asks_for_its_function(kind) and attends_several_times(kind):  # no call tells which one it is
                raise ValueError(
                    f"'same_choice' needs layers that attend once: {kind.__name__} of {type(model).__name__} "
                    "attends several times. Leave it out."
                )
        kinds: Sequence[str] = getattr(text_config(model), "layer_types", None) or ()
        for layer, chooser in enumerate(schedule.choosers(count)) if kinds else ():
            if kinds[layer] != kinds[chooser]:  # neither sees what the other one chooses among
                raise ValueError(
                    f"'same_choice' must have layers of one kind together: of {type(model).__name__}, layer "
                    f"{chooser} has {kinds[chooser]} and layer {layer} has {kinds[layer]}. Group them apart."
                )
    return layers

"""`Plan` says what attends in each layer of one model, and why; it is a JSON file that people can read."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor

from blocksparse.check.validators import Rule, count, is_real, optional, positive, shown, size
from blocksparse.layers.head_groups import AnyPipeline, HeadGroups, Heads
from blocksparse.layers.schedule import LayerPipeline, Schedule, heads_of, setting, text_config
from blocksparse.presets.named import Candidate, TuneError, UpTo

_SAMPLES = 512  # numbers of each weight, so that every one of 128 heads has some
_ROW, _COLUMN = 0.7548776662466927, 0.5698402909980532  # multiples of them, modulo 1, fill a square evenly
_OF_THE_CONFIG = (  # they change attention, and no weight
    "rope_parameters", "no_rope_layers", "sliding_window", "attention_chunk_size", "layer_types",
    "num_kv_shared_layers", "query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping",
    "attn_temperature_tuning", "attn_scale", "floor_scale",
)  # fmt: skip
_ACTIVATION = re.compile("_act$|activation")  # names or lists, such as "silu"
_OF_A_RUN = re.compile("use_cache|output_|return_|.*token_id|.*dropout")  # numbers that users change as they like


@final
@frozen
class Fingerprint:
    """The model that a plan was made for."""

    name: str  # of the folder or the hub, for people; not compared
    type: str
    layers: int
    heads: int
    kv_heads: int
    weights: str  # a hash of some numbers of every weight, adapters, and the config's numbers, positions, windows

    @classmethod
    def of(cls, network: Any) -> Fingerprint:
        """The fingerprint of a transformers model; the same on every device, and over ranks that all call it.

        Raises:
            TuneError: the model does not hold its weights, as one that accelerate offloads.
        """
        config, digest = text_config(network), hashlib.sha256()
        for name, weight in _weights(network):
            if weight.is_meta:
                raise TuneError(
                    f"the model must hold its weights: {name} is on the meta device, offloaded or not loaded. "
                    "Make the schedule with a model that is not offloaded, and attach it to this one."
                )
            digest.update(f"{name} {tuple(weight.shape)} ".encode())
            for plain in _plain(weight):
                digest.update(_some(plain.detach()).to("cpu", torch.float32).numpy().tobytes())
        for name, module in network.named_modules():
            if hasattr(module, "merged_adapters"):  # of PEFT, which may hold others than those that it adds
                used = [] if module.disable_adapters else module.active_adapters
                factors = [getattr(module, "scaling", {}).get(adapter) for adapter in used]
                digest.update(f"{name} {used} {factors} ".encode())
        usual = type(config)().to_dict()
        numbers = {name: x for name, x in config.to_dict().items() if isinstance(x, int | float)}
        numbers |= {name: x for name, x in config.to_dict().items() if _ACTIVATION.search(name)}
        settings = {name: x for name, x in numbers.items() if x != usual.get(name) and not _OF_A_RUN.match(name)}
        settings |= {name: setting(config, name) for name in _OF_THE_CONFIG}
        digest.update(json.dumps(settings, sort_keys=True).encode())
        heads, kv_heads = heads_of(config)
        name = (
            str(getattr(network.config, "_name_or_path", "") or type(network).__name__).rstrip("/").split("/")[-1]
        )
        sizes = {"layers": int(config.num_hidden_layers), "heads": heads, "kv_heads": kv_heads}
        return cls(name=name, type=str(config.model_type), **sizes, weights=digest.hexdigest()[:32])

    def difference(self, other: Fingerprint) -> str | None:
        """In what the models differ, as text, or None."""
        for what in ("type", "layers", "heads", "kv_heads"):
            if getattr(self, what) != getattr(other, what):
                return f"{what.replace('_', ' ')}: {getattr(self, what)} and {getattr(other, what)}"
        return None if self.weights == other.weights else "weights or settings"


def _weights(network: Any) -> Iterator[tuple[str, Tensor]]:
    """All parameters and saved buffers, by name: quantised layers hold their weights as buffers."""
    yield from network.named_parameters()
    for path, module in network.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def _plain(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that make a weight: ranks may hold shards of it, and a quantised one is several."""
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
    else:
        for name in weight.__tensor_flatten__()[0]:
            yield from _plain(getattr(weight, name))


def _some(weight: Tensor) -> Tensor:
    """Numbers of a weight at positions spread over its rows and columns; all of a small one."""
    flat, columns = weight.reshape(-1), max((1, *weight.shape[-1:]))
    if flat.numel() <= _SAMPLES:
        return flat
    step = torch.arange(_SAMPLES, dtype=torch.float64, device="cpu")  # others may know no float64
    row, column = step * _ROW % 1 * (flat.numel() // columns), step * _COLUMN % 1 * columns
    return flat[(row.long() * columns + column.long()).to(flat.device)]


FORMAT = "blocksparse plan 2"
_log = logging.getLogger(__name__)
# A file may be edited by hand, and JSON in Python knows NaN and Infinity.
_amount = Rule("a finite number, at least 0", is_real, lambda x: 0 <= x < float("inf"))
_share = Rule("a number from 0 to 1", is_real, lambda x: 0 <= x <= 1)


@final
@frozen
class Part:
    """The attention of one layer, or of some of its KV heads, and measurements with this part alone sparse."""

    layer: int
    heads: tuple[int, ...] | None  # KV heads; None is all
    attention: Candidate | None  # None is dense
    density: float = field(validator=_share)
    # Nats, less the noise of kernels, mean over positions of the text; None where the strategy measures none.
    text_kl: float | None = field(validator=optional(_amount))
    answer_kl: float | None = field(validator=optional(_amount))  # the same at the tokens of answers
    ms: float = field(validator=_amount)  # predicted; 0 of a layer that cannot be sparse, which is not timed


@final
@frozen
class AtLength:
    """KL and other losses of a plan on held prompts of about one length."""

    tokens: int = field(validator=size)  # of the longest of these prompts
    # Work as a share of dense attention's, mean over layers and query heads.
    density: float = field(validator=_share)
    text_kl: float = field(validator=_amount)  # nats, less the noise of kernels
    answer_kl: float = field(validator=_amount)
    answers: int = field(validator=count)
    dense_found: int = field(validator=count)  # answers that dense attention finds
    found: int = field(validator=count)  # answers of which every token was the likeliest


@final
@frozen
class Try:
    """A verified plan, with its KL on held prompts at the length with the highest KL."""

    density: float = field(validator=_share)  # at the greatest length
    text_kl: float = field(validator=_amount)
    answer_kl: float = field(validator=_amount)
    found: int = field(validator=count)  # at all lengths
    ms: float = field(validator=_amount)  # predicted for the layers that can be sparse, at the greatest length
    lengths: tuple[AtLength, ...]  # the shortest first


@final
@frozen
class Evidence:
    """How a plan was found, and its results on prompts that it was not tuned on."""

    strategy: str
    minimise: str
    text_kl_budget: float | None = field(validator=optional(positive))  # None where the strategy has none
    answer_kl_budget: float | None = field(validator=optional(positive))
    tokens: tuple[int, ...] = field(validator=validators.deep_iterable(size))  # lengths of the prompts
    prompts: str  # hash of the prompts that candidates were compared on
    held: str  # hash of the prompts that plans were verified on
    answers: int = field(validator=count)  # in the held prompts
    dense_found: int = field(validator=count)  # of these, by dense attention
    noise_text_kl: float = field(validator=_amount)  # everything kept in all layers, against dense attention
    noise_answer_kl: float = field(validator=_amount)
    dense_ms: float = field(validator=_amount)  # predicted for the same layers as in `plan`
    batch: int = field(validator=size)  # prompts in a call, of which `ms` and `dense_ms` are
    plan: Try
    tries: tuple[Try, ...]  # all that were verified, in order
    candidates: int = field(validator=size)
    dtype: str  # of the model
    device: str
    versions: Mapping[str, str]


_LARGEST = 10_000  # layers or KV heads, so that a wrong number in a file takes no memory


@final
@frozen
class Plan:
    """The attention of each layer of one model: `attach(model, Plan.load("plan.json").schedule(model))`."""

    model: Fingerprint
    layers: tuple[Part, ...] = field()
    evidence: Evidence = field()

    @evidence.validator
    def _check_evidence(self, _: object, evidence: Evidence) -> None:
        if not evidence.plan.lengths:
            raise TuneError("the plan names no length at which it was verified. Tune again.")

    @layers.validator
    def _check_layers(self, _: object, parts: tuple[Part, ...]) -> None:
        layers, kv_heads = self.model.layers, self.model.kv_heads
        # Each layer has a part, and a KV head that stands alone has one too: sizes far beyond them are no model's.
        if not 1 <= layers <= _LARGEST or not 1 <= kv_heads <= _LARGEST:
            raise TuneError(
                f"a model has from 1 to {_LARGEST} layers and KV heads, and the plan names {layers} and "
                f"{kv_heads}. Tune again."
            )
        every = tuple(range(kv_heads))
        heads: dict[int, list[int]] = {}
        for part in parts:
            if part.heads == ():
                raise TuneError(f"a part of layer {part.layer} of the plan names no KV heads. Tune again.")
            heads.setdefault(part.layer, []).extend(every if part.heads is None else part.heads)
        if wrong := sorted(set(heads) ^ set(range(layers))):
            state = "has no" if wrong[0] in range(layers) else "has a"
            raise TuneError(
                f"the plan is for a model of {layers} layers, 0 to {layers - 1}, but {state} layer {wrong[0]}. "
                "Tune again."
            )
        for layer, named in heads.items():
            if sorted(named) != list(every):
                raise TuneError(
                    f"layer {layer} of the plan must name each of {len(every)} KV heads once: {named}. Tune again."
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompts that the plan was verified on."""
        return max(each.tokens for each in self.evidence.plan.lengths)

    def schedule(self, model: Any) -> Schedule:
        """The schedule for `attach`.

        Layers whose choice keeps a fixed number of tokens, as windows do, are dense in prompts of more than
        `longest` tokens. If there are such layers, the log says so once, here.

        Raises:
            TuneError: `model` is not the model that the plan was made for.
        """
        if difference := self.model.difference(Fingerprint.of(model)):
            raise TuneError(
                f"the plan was made for another model, {self.model.name} (it differs in {difference}). "
                "Tune this one."
            )
        return self.unchecked()

    def unchecked(self) -> Schedule:
        """The same for a model that is not at hand as transformers has it, as in a server."""
        groups: dict[int, dict[Heads, AnyPipeline | None]] = {}
        chosen: dict[int, set[str]] = {}
        for part in self.layers:
            pipeline = None if part.attention is None else self._held(part.attention)
            groups.setdefault(part.layer, {})[
                tuple(range(self.model.kv_heads)) if part.heads is None else part.heads
            ] = pipeline
            chosen.setdefault(part.layer, set()).add(str(part.attention))
        layers: dict[int, LayerPipeline | None] = {
            layer: next(iter(of_heads.values())) if len(chosen[layer]) == 1 else HeadGroups(of_heads)
            for layer, of_heads in groups.items()
        }
        fixed = sorted({part.layer for part in self.layers if part.attention and part.attention.fixed_budget})
        if fixed:
            _log.warning(
                "the plan was verified up to %d tokens; in longer prompts its layers %s, which keep a fixed "
                "number of tokens, attend densely: tune at the greatest length that you serve",
                self.longest,
                ", ".join(map(str, fixed)),
            )
        return Schedule(None, layers=layers)

    def _held(self, attention: Candidate) -> AnyPipeline:
        """The attention where it was verified, and dense attention where a fixed budget was not."""
        pipeline = attention.pipeline()
        if not attention.fixed_budget:
            return pipeline
        return evolve(pipeline, selector=UpTo(pipeline.selector, self.longest))

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        content = {"format": FORMAT, **_converter().unstructure(self)}
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n")
        unfinished.replace(path)  # so that a run that is killed leaves no half plan behind

    @classmethod
    def load(cls, path: Path | str, *, edited: bool = False) -> Plan:
        """Read a plan.

        Args:
            edited: take the plan although it was changed by hand, so that its evidence is for another one.

        Raises:
            TuneError: the file cannot be read, is not a plan, was edited, or names what there is not.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TuneError(f"the plan cannot be read: {path}: {error}") from None
        if not isinstance(content, dict) or not str(content.get("format", "")).startswith("blocksparse plan "):
            raise TuneError(f"{path} is not a plan of blocksparse. `blocksparse tune` writes one.")
        if content["format"] != FORMAT:
            raise TuneError(f"{path} is a {content['format']!r}, and this version reads {FORMAT!r}. Tune again.")
        checksum = content.pop("checksum", None)
        if not edited and checksum != _checksum(content):
            raise TuneError(
                f"{path} was edited after it was made, so its evidence is for another plan. Tune again, or take "
                "it all the same with Plan.load(path, edited=True)."
            )
        del content["format"]
        try:
            plan: Plan = _converter().structure(content, cls)
        except TuneError as error:
            raise TuneError(f"{path}: {error}") from None
        except Exception as error:  # cattrs raises what the classes raise, and its own errors
            raise TuneError(
                f"{path} is not a whole plan: {type(error).__name__}: {shown(str(error))}. Tune again."
            ) from None
        return plan


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _converter() -> Any:
    """JSON to plans and back; it turns no text into numbers and leaves nothing out."""
    try:
        from cattrs.preconf.json import make_converter
    except ModuleNotFoundError as error:
        raise TuneError(f"{error.name} is not installed. Run pip install -e '.[tune]' in a checkout.") from None
    converter = make_converter(forbid_extra_keys=True, detailed_validation=False)
    for kind, takes in ((int, int), (float, int | float), (str, str)):

        def exactly(value: Any, _: Any, kind: Any = kind, takes: Any = takes) -> Any:
            if not isinstance(value, takes) or isinstance(value, bool):
                raise TypeError(f"{shown(value)} is not of type {kind.__name__}")
            return kind(value)

        converter.register_structure_hook(kind, exactly)
    return converter

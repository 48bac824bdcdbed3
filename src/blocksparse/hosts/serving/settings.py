"""`Settings`: the checked configuration `{"blocksparse": {...}}` of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from attrs import evolve, frozen

from blocksparse.check.per_head import check_heads
from blocksparse.check.validators import UserError, a, flag, shown, size, whole
from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.executor import Executor
from blocksparse.execute.flex import FlexExecutor
from blocksparse.execute.int8 import Int8Executor
from blocksparse.execute.triton import TritonExecutor
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline, Schedule, heads_of
from blocksparse.observe.audit import Audit, Crossing
from blocksparse.pipeline import Pipeline
from blocksparse.presets.named import always_sparse, extended, maker
from blocksparse.presets.plan import Plan
from blocksparse.select.positions import Band, Sink

_log = logging.getLogger(__name__)
KEY = "blocksparse"
_KEYS = (
    "preset", "quality", "settings", "band", "sink", "executor", "plan", "dense", "dense_below", "min_tokens",
    "min_queries", "record", "audit",
)  # fmt: skip
_OF_AN_AUDIT = ("rows", "every", "min_mass", "max_error")
_OF_A_PRESET = ("quality", "settings", "band", "sink", "executor", "dense")
EXECUTORS: dict[str, Callable[[], Executor[Any, Any]]] = {
    "auto": AutoExecutor, "triton": TritonExecutor, "int8": Int8Executor, "flex": FlexExecutor,
}  # fmt: skip


class ConfigurationError(UserError, ValueError):
    """The engine cannot start as asked. The message says why and what to do."""


@final
@frozen
class Served:
    """The properties of the model and the engine that a configuration must fit."""

    type: str
    layers: int
    heads: int
    kv_heads: int
    ranks: int = 1  # GPUs that each have some of the heads
    draft_tokens: int = 0  # that speculative decoding adds to the one token of a request

    @classmethod
    def of(cls, text: Any, *, ranks: int, draft_tokens: int = 0) -> Served:
        """
        Args:
            text: transformers' configuration of the language model.
        """
        heads, kv_heads = heads_of(text)
        return cls(
            type=str(text.model_type),
            layers=int(text.num_hidden_layers),
            heads=heads,
            kv_heads=kv_heads,
            ranks=ranks,
            draft_tokens=draft_tokens,
        )


@final
@frozen
class Host:
    """The names by which users of an engine select and configure this library, for error messages."""

    backend: str
    option: str  # that takes JSON


@final
@frozen(eq=False)
class Settings:
    """The pipeline of each layer, and the requests for which it runs.

    Args:
        layers: the pipeline of each layer. None is dense.
        min_tokens: requests of fewer tokens, context and queries together, are dense.
        min_queries: requests with fewer queries in one step are dense. Decoding always is.
        dense_below: requests with less work are dense. As in `AutoExecutor`.
        record: keep a record of what each call did.
        audit: estimates the error of all calls. Crossed bounds are logged.
    """

    layers: tuple[LayerPipeline | None, ...]
    min_tokens: int = 512
    min_queries: int = 64
    dense_below: float | None = None
    record: bool = False
    audit: Audit | None = None

    @classmethod
    def of(cls, options: object, served: Served, host: Host) -> Settings:
        """Read the value of the option that `host` names.

        Raises:
            ConfigurationError: it has no entry for blocksparse, or one that does not fit the model.
        """
        given = options.get(KEY) if isinstance(options, Mapping) else None
        if given is None:
            raise ConfigurationError(
                f"the attention backend {host.backend} needs to know what to run. Add "
                f"""{host.option} '{{"{KEY}": {{"preset": "auto"}}}}'."""
            )
        try:
            return cls._read(given, served)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"'{KEY}' in {host.option} cannot be used: {error}") from None

    @classmethod
    def _read(cls, given: object, served: Served) -> Settings:
        if not isinstance(given, Mapping):
            raise TypeError(f"it must be an object with some of {', '.join(_KEYS)}: {shown(given)}")
        if unknown := [key for key in given if key not in _KEYS]:
            raise ValueError(f"there is no {shown(unknown[0])}. There are {', '.join(_KEYS)}.")
        if ("preset" in given or "quality" in given) == ("plan" in given):
            raise ValueError(
                f"it must have one of 'preset' and 'plan': {shown(dict(given))}. Give one of the two."
            )
        schedule = _plan(given, served) if "plan" in given else _preset(given, served)
        dense_below = AutoExecutor(dense_below=given.get("dense_below")).dense_below  # which refuses what is none
        settings = cls(
            tuple(map(_always_runs, schedule.resolve(served.layers))),
            dense_below=dense_below,
            **{name: whole(given[name]) for name in ("min_tokens", "min_queries") if name in given},
            record=given.get("record", False),
            audit=_audit(given["audit"]) if "audit" in given else None,
        )
        size.check(min_tokens=settings.min_tokens, min_queries=settings.min_queries)
        flag.check(record=settings.record)
        # A drafter that runs in parallel adds as many tokens again.
        if settings.min_queries <= (most := 1 + 2 * served.draft_tokens):
            raise ValueError(
                f"'min_queries' must be above {most}, the most queries that a request has while it decodes: "
                f"{settings.min_queries}. Raise it."
            )
        return settings


def _audit(given: object) -> Audit:
    """An audit that says in the log where a bound is crossed. Layers stay sparse."""
    if not isinstance(given, Mapping) or any(key not in _OF_AN_AUDIT for key in given):
        raise ValueError(
            f"'audit' must be an object with some of {', '.join(_OF_AN_AUDIT)}: {shown(given)}. "
            "An empty one has the defaults."
        )
    bounded = "min_mass" in given or "max_error" in given
    return Audit(**given, on_crossed=_warn if bounded else None)


def _warn(crossing: Crossing) -> None:
    _log.warning(
        "blocksparse: an audit crossed its bound in layer %d: covered mass %s, error %s",
        crossing.layer, crossing.covered_mass, crossing.error,
    )  # fmt: skip


def _preset(given: Mapping[str, Any], served: Served) -> Schedule:
    name, arguments = given.get("preset", "auto"), given.get("settings", {})
    make = maker(name)
    a(Mapping).check(settings=arguments)
    if "quality" in given:
        if name != "auto" or "quality" in arguments:
            raise ValueError(
                f"'quality' is an argument of the preset 'auto', and must be given once: {shown(dict(given))}. "
                "Leave out the other preset."
            )
        arguments = {**arguments, "quality": given["quality"]}
    for argument, value in arguments.items():
        if isinstance(value, list) and served.ranks > 1:
            raise ValueError(
                f"'{argument}' must be one number for all heads, because each of {served.ranks} GPUs has some of "
                f"the heads: {shown(value)}"
            )
        if isinstance(value, list) and len(value) != served.heads:
            raise ValueError(
                f"'{argument}' must have a number per query head ({served.heads}): {shown(value)}. "
                "Or give one number for all."
            )
    pipeline = make(**arguments)
    rules = [rule(whole(given[key])) for rule, key in ((Band, "band"), (Sink, "sink")) if key in given]
    pipeline = extended(pipeline, rules)
    if "executor" in given:
        if given["executor"] not in list(EXECUTORS):
            raise ValueError(f"there is no executor {shown(given['executor'])}. There are {', '.join(EXECUTORS)}.")
        pipeline = evolve(pipeline, executor=EXECUTORS[given["executor"]]())
    _check_heads(pipeline, served)
    return Schedule(pipeline, dense=given.get("dense", []))


def _check_heads(pipeline: Pipeline[Any, Any, Any], served: Served) -> None:
    """Refuse numbers per query head, as a user's own function may choose them, that are not for this model's."""
    check_heads(pipeline, served.heads)
    if served.ranks > 1:
        try:
            check_heads(pipeline, 0)
        except ValueError:
            raise ValueError(
                f"a pipeline must have one number for all heads, because each of {served.ranks} GPUs has some of "
                f"the heads: {shown(pipeline)}. Give one number."
            ) from None


def _always_runs(layer: LayerPipeline | None) -> LayerPipeline | None:
    """The pipeline without its own choice of dense attention: the engine decides that, and has a kernel for it."""
    if isinstance(layer, HeadGroups):
        return HeadGroups({heads: part and always_sparse(part) for heads, part in layer.groups.items()})
    return layer and always_sparse(layer)


def _plan(given: Mapping[str, Any], served: Served) -> Schedule:
    for key in _OF_A_PRESET:
        if key in given:
            raise ValueError(f"a plan says what each layer does, so '{key}' must be left out.")
    if not isinstance(given["plan"], str):
        raise TypeError(f"'plan' must be the path of a file: {shown(given['plan'])}. Write its name.")
    plan = Plan.load(given["plan"])
    # The weights of a served model are laid out otherwise and may be quantised, so they are not compared.
    here = evolve(plan.model, type=served.type, layers=served.layers, heads=served.heads, kv_heads=served.kv_heads)
    if difference := plan.model.difference(here):
        raise ValueError(
            f"the plan was made for another model, {plan.model.name} (it differs in {difference}). Tune this one."
        )
    by_head = [
        part.layer
        for part in plan.layers
        if part.heads is not None
        or (part.attention is not None and any(isinstance(x, list) for x in part.attention.arguments.values()))
    ]
    if served.ranks > 1 and by_head:
        raise ValueError(
            f"the plan chooses for single heads in layer {by_head[0]}, but each of {served.ranks} GPUs has some "
            "of the heads. Tune the model with one group of heads per layer."
        )
    return plan.unchecked()

"""Sparse attention inside Hugging Face diffusers: `attach(pipe.transformer, sparge(order=HilbertOrder()))`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, final
from uuid import uuid4
from weakref import finalize

import torch
from attrs import field, frozen
from diffusers import ModelMixin
from torch import nn
from torch.utils.hooks import RemovableHandle

from blocksparse.check.validators import a, count, is_whole, optional, shown, size
from blocksparse.hosts.diffusers.adapter import DiffusersAdapter, StepSchedule, layer_names
from blocksparse.hosts.diffusers.backend import (
    BACKEND,
    OWN,
    REDIRECT,
    DispatcherBackend,
    Redirect,
    dispatches,
    own_of,
    stand_in,
)
from blocksparse.hosts.diffusers.families import FAMILIES, LEFT_OUT, Family, the_timestep
from blocksparse.hosts.token_layout import check_orders
from blocksparse.launch.torch_modes import is_checkpointed
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.reused_mask import MaskCache
from blocksparse.layers.schedule import LayerPipeline, Schedule, schedule_of
from blocksparse.observe.audit import Audit
from blocksparse.observe.density_recorder import DensityRecorder

_OUTSIDE = "the layout of a call is read outside compiled code"


@final
@frozen(eq=False)
class Layer:
    """An attention module with its own processor, and the one that stands in for it."""

    name: str
    module: nn.Module
    own: Any
    stand_in: Any
    route: DispatcherBackend | Redirect  # where attention of the stand-in goes

    def check(self) -> None:
        """Refuse a module whose attention was changed since it was attached."""
        route = self.route
        backend = route.name if isinstance(route, DispatcherBackend) else getattr(self.own, BACKEND, None)
        if self.module.processor is not self.stand_in:
            changed = "processor"
        elif getattr(self.stand_in, BACKEND, None) is not backend:
            changed = "attention backend"
        else:
            return
        raise RuntimeError(
            f"the {changed} of {self.name} was changed while a pipeline is attached, which would leave it out. "
            "Call detach(), change it, then attach again."
        )

    def restore(self) -> None:
        """Give the module its own processor back, with what was set on the stand-in in the meantime.

        The stand-in becomes one like it: diffusers may have kept it, to put it back after projections were fused.
        """
        own = own_of(self.stand_in)
        self.stand_in.__class__ = type(own)
        vars(self.stand_in).clear()
        vars(self.stand_in).update(vars(own))
        if self.module.processor is self.stand_in:
            self.module.processor = own


@final
@frozen(eq=False)
class Attachment:
    """A pipeline in a model of diffusers, until `detach()` or the end of a `with` block.

    A deep copy or a pickle of the model has no pipeline; it attends as the model did before. When the model is
    garbage-collected, nothing of its attachment stays behind.
    """

    layers: tuple[Layer, ...] = field(repr=lambda layers: f"<{len(layers)} attention modules>")
    _adapter: DiffusersAdapter = field(repr=False)
    _hooks: tuple[RemovableHandle, ...] = field(repr=False)
    _end: finalize[..., Any] = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, layers: tuple[Layer, ...], adapter: DiffusersAdapter) -> Attachment:
        """Let these stand-ins attend, and the adapter know of every forward call of `model`."""
        for layer in layers:
            layer.module.processor = layer.stand_in
        hooks = (
            model.register_forward_pre_hook(_Begin(adapter, layers), with_kwargs=True),
            # The end is noted after a forward call that fails, too.
            model.register_forward_hook(_End(adapter), with_kwargs=True, always_call=True),
        )
        end = finalize(
            model, _unregister, [layer.route for layer in layers if isinstance(layer.route, DispatcherBackend)]
        )
        end.atexit = False
        return cls(layers, adapter, hooks, end)

    def detach(self) -> None:
        """Give the model its previous attention back. A second call does nothing.

        Raises:
            RuntimeError: a forward call of the model runs in another thread.
        """
        if self._adapter.elsewhere:
            raise RuntimeError(
                "a forward call of the model still runs in another thread. Detach when it has ended."
            )
        for hook in self._hooks:
            hook.remove()
        if self._end.alive:
            for layer in self.layers:
                layer.restore()
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _unregister(backends: Iterable[DispatcherBackend]) -> None:
    for backend in backends:
        backend.unregister()


def _nothing(*_: Any) -> None:
    """The hook of a copy of an attached model."""


def _no_hook() -> Callable[..., None]:
    return _nothing


@frozen(eq=False)
class _Hook:
    """A hook that does nothing in copies and pickles of the model."""

    adapter: DiffusersAdapter

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


@final
@frozen(eq=False)
class _Begin(_Hook):
    layers: tuple[Layer, ...]

    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for layer in self.layers:
            layer.check()
        given = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        given.apply_defaults()
        self.adapter.begin(given.arguments, trains=_trains(model))


def _trains(model: nn.Module) -> str | None:
    """Why a call may belong to a training step, of what stands behind the model too; asked before the blocks."""
    if torch.is_grad_enabled() or is_checkpointed():
        return "gradients"
    return "training" if model.training else None


@final
@frozen(eq=False)
class _End(_Hook):
    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        self.adapter.end()


def attach(
    model: ModelMixin,
    pipeline: LayerPipeline | Schedule,
    *,
    dense_steps: Sequence[int] = (),
    by_step: Mapping[int, LayerPipeline | Schedule] | None = None,
    choose_every: int | None = None,
    min_tokens: int = 512,
    recorder: DensityRecorder | None = None,
    audit: Audit | None = None,
    family: Family | None = None,
) -> Attachment:
    """Run `pipeline` wherever tokens of pictures or videos attend to one another in `model`.

    This lasts until `detach()` is called, or for a `with` block:

        with attach(pipe.transformer, sparge(order=HilbertOrder()), dense_steps=range(5)):
            pipe(prompt)

    Attention is not causal. Orders without a grid get the grid of each call. Text in the same sequence is always
    kept, as keys of all queries and with all keys for its own queries. Its padding is left out.

    Args:
        model: the transformer of a pipeline, one of the classes in `FAMILIES`.
        pipeline: the pipeline of every layer, or a `Schedule` that chooses by the index of the block. Blocks are
            counted from 0 in the order in which the model runs them.
        dense_steps: denoising steps that stay dense. They count from 0 in each call of a diffusers pipeline. A
            timestep nearer to noise, or another prompt, begins a new call.
        by_step: pipelines that replace `pipeline` from these steps on. `{25: subblock(0.15)}` makes the later half
            cheaper. Steps are counted as for `dense_steps`.
        choose_every: for how many denoising steps a layer attends to the blocks that it chose in the first of
            them. None for one. A choice belongs to the tensor of the prompt that a diffusers pipeline passes in
            every step. So each half of classifier-free guidance has its own choices, and so has each run. Not for
            compiled models, nor for `HeadGroups`. `recorder.choice_ages()` says how old choices were.
        min_tokens: attention over fewer tokens than this stays dense.
        recorder: gets a record of what each call did. If None, nothing is recorded.
        audit: compares a few random queries of some sparse calls with dense attention. None for no audit. Where
            choices are kept, it reports how much mass they still cover. A layer that crosses a bound chooses
            again. Or the layer whose choice it takes does so in the next step.
        family: the token layout of a model that is not known.

    Raises:
        TypeError: `model` is not a model of diffusers, or `pipeline` is not a pipeline.
        ValueError: the model is not known, is attached already, or lacks a layer that the schedule names. Or an
            order places text by itself.
    """
    if not isinstance(model, ModelMixin):
        raise TypeError(
            f"'model' must be a model of diffusers: {type(model).__name__}. Of a pipeline give the transformer, "
            "of a compiled model the model in it. Language models have hosts.transformers.attach."
        )
    schedules = {0: schedule_of(pipeline)} | _by_step(by_step)
    if not isinstance(dense_steps, Sequence) or not all(map(is_whole, dense_steps)):
        raise TypeError(f"'dense_steps' must be a sequence of whole numbers: {shown(dense_steps)}")
    count.check(**{f"dense_steps[{i}]": step for i, step in enumerate(dense_steps)})
    size.check(min_tokens=min_tokens)
    optional(size).check(choose_every=choose_every)
    optional(a(DensityRecorder)).check(recorder=recorder)
    optional(a(Audit)).check(audit=audit)
    optional(a(Family)).check(family=family)
    family = family or FAMILIES.get(type(model).__name__)
    if family is None:
        reason = LEFT_OUT.get(type(model).__name__, f"not one of {', '.join(FAMILIES)}")
        raise ValueError(
            f"{type(model).__name__} is not a known transformer ({reason}). "
            "Give family=Family(...), which says where its tokens stand."
        )
    told = "timestep" in signature(type(model).forward).parameters
    told_by = {
        "dense_steps": dense_steps, "by_step": by_step, "choose_every": choose_every,
        "same_choice": any(each.same_choice for each in schedules.values()),
    }  # fmt: skip
    if any(told_by.values()) and not told and family.timestep is the_timestep:
        name = next(name for name, given in told_by.items() if given)
        raise ValueError(
            f"'{name}' needs a model that is told the 'timestep', and {type(model).__name__} is not. Leave it out."
        )
    names = layer_names(model, family)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no blocks with attention named {' or '.join(family.attention)}. "
            "Name those of your model."
        )
    keeps = choose_every is not None or any(each.same_choice for each in schedules.values())
    apart = recorder is not None or audit is not None or keeps or len(schedules) > 1
    by_first = tuple(
        StepSchedule(first, schedule.resolve(len(names)), schedule.choosers(len(names)))
        for first, schedule in sorted(schedules.items(), key=lambda each: each[0])
    )
    attentions = [attention for each in by_first for attention in each.layers if attention is not None]
    if choose_every and any(isinstance(attention, HeadGroups) for attention in attentions):
        raise ValueError("'choose_every' keeps what pipelines choose, and HeadGroups are several. Leave it out.")
    for attention in attentions:
        check_orders(attention)
    adapter = DiffusersAdapter(
        family, model.config, by_first, frozenset(map(int, dense_steps)), int(min_tokens), recorder, audit,
        MaskCache(int(choose_every or 1)) if keeps else None,
    )  # fmt: skip
    return Attachment.of(model, _layers(model, names, by_first[0].layers, adapter, apart=apart), adapter)


def _by_step(by_step: object) -> dict[int, Schedule]:
    """The schedules by the steps from which on they attend."""
    if by_step is None:
        return {}
    if not isinstance(by_step, Mapping) or not all(map(is_whole, by_step)):
        raise TypeError(f"'by_step' must be a mapping of steps to pipelines: {shown(by_step)}")
    for step in by_step:
        size.check(**{"a step of by_step": step})
    return {int(step): schedule_of(attention) for step, attention in by_step.items()}


def _layers(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    attentions: Sequence[LayerPipeline | None],
    adapter: DiffusersAdapter,
    *,
    apart: bool,
) -> tuple[Layer, ...]:
    """Every attention module over pictures, with the processor that stands in for its own."""
    prefix, routes, layers = f"blocksparse-{uuid4().hex}", dict[Any, DispatcherBackend | Redirect](), []
    for layer, name in ((layer, name) for layer, names_of_block in enumerate(names) for name in names_of_block):
        module = model.get_submodule(name)
        own = getattr(module, "processor", None)
        if own is None:
            raise ValueError(f"{name} of {type(model).__name__} has no attention processor")
        if hasattr(own, OWN):
            raise ValueError(f"{type(model).__name__} is attached already. Call detach() on that pipeline first.")
        if masks := not type(own).__module__.startswith("diffusers."):
            adapter.masking.add(layer)
        # What layers share is compiled once. One pipeline in several layers is one object.
        asks = dispatches(own) and not adapter.family.redirected
        route = layer if apart else id(attentions[layer]), masks, getattr(own, BACKEND) if asks else REDIRECT
        if route not in routes and not asks:
            routes[route] = Redirect(layer, adapter)
        elif route not in routes:
            routes[route] = DispatcherBackend.registered(
                f"{prefix}-{len(routes)}", getattr(own, BACKEND), layer, adapter
            )
        layers.append(Layer(name, module, own, stand_in(own, routes[route]), routes[route]))
    return tuple(layers)

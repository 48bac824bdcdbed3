"""`Attachment`: a pipeline that a diffusers model uses until it is detached."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final
from weakref import finalize

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from blocksparse.hosts.diffusers.adapter import DiffusersAdapter
from blocksparse.hosts.diffusers.backend import BACKEND, DispatcherBackend, Redirect, own_of
from blocksparse.launch.torch_modes import is_checkpointed

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
        if self.module.processor is not self.stand_in:
            changed = "processor"
        elif isinstance(self.route, DispatcherBackend) and getattr(self.stand_in, BACKEND) is not self.route.name:
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
        self.adapter.begin(given.arguments, trains=_trains(model, given.arguments))


def _trains(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """Why a forward call belongs to a training step, or None.

    This is asked once, before the blocks: reentrant checkpointing runs a block first without gradients.
    """
    if torch.is_grad_enabled() and any(
        x.requires_grad for x in (*model.parameters(), *given.values()) if isinstance(x, Tensor)
    ):
        return "gradients"
    if model.training:
        return "training"
    return "gradients" if is_checkpointed() else None


@final
@frozen(eq=False)
class _End(_Hook):
    @torch.compiler.disable(reason=_OUTSIDE)  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        self.adapter.end()

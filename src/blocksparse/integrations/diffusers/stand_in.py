"""Processors that stand in for those of a model, so that attention reaches an adapter.

Some processors ask diffusers' dispatcher, and get the name of a backend. The others call PyTorch's function, and
their calls of it are redirected. Either way the processor's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from blocksparse.integrations.diffusers.backend import Backend, Redirect

BACKEND = "_attention_backend"
"""The attribute by which a processor names the backend that the dispatcher takes."""

OWN, REDIRECT = "stands_in_for", "redirected_to"
"""The attributes by which a stand-in knows the processor of the model, and what its attention goes to."""


@final
class _Redirected(TorchFunctionMode):
    """While it is entered, calls of PyTorch's attention go to `attend`, and everything else runs as it is."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is scaled_dot_product_attention:
            self.used = True
            return self.attend(*args, **(kwargs or {}))
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo traces the function, and not the method in Python
        return func(*args, **(kwargs or {}))


def stand_in(processor: Any, to: Backend | Redirect) -> Any:
    """A copy of `processor` whose attention goes to a backend or a redirect; copies of it are of `processor`."""
    kind: Any = type(processor)
    twin: Any = object.__new__(_kind(kind, redirected=isinstance(to, Redirect)))
    vars(twin).update(vars(processor))
    vars(twin)[OWN] = processor
    vars(twin).update({REDIRECT: to} if isinstance(to, Redirect) else {BACKEND: to.name})
    return twin


@cache
def _kind(kind: Any, *, redirected: bool) -> Any:
    """A subclass of a class of processors, one for all layers, so that compiled code serves all of them."""

    def call_redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Redirected(self.redirected_to) as mode:
            out = kind.__call__(self, *args, **kwargs)
        if not (torch.compiler.is_compiling() or mode.used):
            raise RuntimeError(
                f"{kind.__name__} computed attention by itself, so no pipeline can: it calls neither PyTorch's "
                "scaled_dot_product_attention nor diffusers' dispatcher with a backend of its choice; give its "
                "modules another processor, or diffusers the backend 'native'"
            )
        return out

    # Models ask for the names of the arguments that a processor takes, and find them through this attribute.
    call_redirected.__wrapped__ = kind.__call__  # type: ignore[attr-defined]
    methods: dict[str, Any] = {
        "__deepcopy__": lambda self, memo: deepcopy(self.stands_in_for, memo),
        "__reduce__": lambda self: (copy, (self.stands_in_for,)),
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), methods | ({"__call__": call_redirected} if redirected else {}))

"""Processors that stand in for those of a model, so that attention reaches an adapter.

Some processors ask diffusers' dispatcher, and get the name of a backend. The others call PyTorch's function, and
their calls of it are redirected. Either way the processor's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from blocksparse.integrations.diffusers.adapter import Adapter
from blocksparse.integrations.diffusers.backend import Backend

BACKEND = "_attention_backend"
"""The attribute by which a processor names the backend that the dispatcher takes."""


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
        return func(*args, **(kwargs or {}))


def of_dispatcher(processor: Any, backend: Backend) -> Any:
    """A copy of `processor` that names `backend`; copies and pickles of it are of `processor`."""
    return _twin(processor, {}, {BACKEND: backend.name})


def of_torch(processor: Any, layer: int, adapter: Adapter) -> Any:
    """A copy of `processor` whose calls of PyTorch's attention go to `adapter`."""
    kind = type(processor)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        def dense() -> Tensor:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        return adapter.attend(layer, query, key, value, attn_mask, dropout_p, is_causal, scale, dense=dense)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        with _Redirected(attend) as mode:
            out = kind.__call__(self, *args, **kwargs)
        if not (torch.compiler.is_compiling() or mode.used):
            raise RuntimeError(
                f"{kind.__name__} computed attention by itself, so no pipeline can: it calls neither diffusers' "
                "dispatcher nor PyTorch's scaled_dot_product_attention; give its modules another processor"
            )
        return out

    # Models ask for the names of the arguments that a processor takes, and find them through this attribute.
    __call__.__wrapped__ = kind.__call__  # type: ignore[attr-defined]
    return _twin(processor, {"__call__": __call__}, {})


def _twin(processor: Any, methods: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A copy of `processor`, of a subclass with these methods, whose own copies are copies of `processor`."""
    kind = type(processor)
    methods = {
        "__deepcopy__": lambda _, memo: deepcopy(processor, memo),
        "__reduce__": lambda _: (copy, (processor,)),
        "__module__": kind.__module__,
        "stands_in_for": processor,
        **methods,
    }
    twin: Any = object.__new__(type(kind.__name__, (kind,), methods))
    twin.__dict__.update(processor.__dict__, **attributes)
    return twin

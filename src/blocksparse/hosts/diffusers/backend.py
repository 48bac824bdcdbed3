"""How a model's attention reaches an adapter: by a backend, PyTorch's function, or processors that stand in.

Some processors ask diffusers' dispatcher, and get the name of a backend. The others call PyTorch's function, and
their calls of it are redirected. Either way the processor's own code runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from functools import cache
from types import FunctionType
from typing import Any, final

import torch
from attrs import frozen
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _native_attention_backward_op,
    _templated_context_parallel_attention,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from blocksparse.hosts.diffusers.adapter import DiffusersAdapter


@final
@frozen(eq=False)
class Redirect:
    """PyTorch's attention for layers that have one adapter and one pipeline."""

    layer: int
    adapter: DiffusersAdapter

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        ranks: int = 1,
    ) -> Tensor:
        """Attend `query` `[B, Hq, N, D]` to `key` and `value` `[B, Hkv, N, D]`: `[B, Hq, N, D]`.

        The arguments are those of PyTorch's function, and `ranks`: over how many ranks of Ulysses the
        tokens were spread.
        """

        def dense() -> Tensor:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        given = attn_mask, dropout_p, is_causal, scale
        return self.adapter.attend(self.layer, query, key, value, *given, ranks=ranks, dense=dense)


@final
@frozen(eq=False)
class DispatcherBackend:
    """A backend of diffusers' dispatcher for layers that have one adapter, one pipeline and one backend before.

    The dispatcher looks backends up by the members of an enumeration that is closed. It accepts this name, which
    is of the enumeration's type without being a member, so no other model can select it.
    """

    name: AttentionBackendName
    before: AttentionBackendName | None  # what computes dense calls; None is what is active then
    layer: int
    adapter: DiffusersAdapter

    @classmethod
    def registered(
        cls, value: str, before: AttentionBackendName | None, layer: int, adapter: DiffusersAdapter
    ) -> DispatcherBackend:
        """A backend under a new name in the dispatcher's registry."""
        name = str.__new__(AttentionBackendName, value)
        name._name_ = name._value_ = value
        backend = cls(name, before, layer, adapter)
        _AttentionBackendRegistry.register(name, supports_context_parallel=True)(backend.attend)
        return backend

    def unregister(self) -> None:
        """Delete the name. A second call does nothing."""
        for table in ("_backends", "_constraints", "_supported_arg_names"):
            getattr(_AttentionBackendRegistry, table).pop(self.name, None)
        _AttentionBackendRegistry._supports_context_parallel.discard(self.name.value)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Attend `query` `[B, N, Hq, D]` to `key` and `value` `[B, N, Hkv, D]`: `[B, N, Hq, D]`."""

        given = attn_mask, dropout_p, is_causal, scale, enable_gqa

        def dense() -> Tensor:
            out: Tensor = dispatch_attention_fn(
                query, key, value, *given, backend=self.before, parallel_config=_parallel_config
            )
            return out.transpose(1, 2)

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        parallel = _parallel_config and _parallel_config.context_parallel_config
        if parallel is None:
            return self.adapter.attend(self.layer, q, k, v, *given[:4], dense=dense).transpose(1, 2)
        ranks, ring = parallel.ulysses_degree, parallel.ring_degree > 1
        if reason := self.adapter.dense_before_gathering(self.layer, q, attn_mask, ranks=ranks, ring=ring):
            self.adapter.saw_dense(self.layer, reason)
            return dense().transpose(1, 2)

        def with_all_tokens(_: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **__: Any) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return Redirect(self.layer, self.adapter)(q, k, v, *given[:5], ranks=ranks).transpose(1, 2)

        gathered: Tensor = _templated_context_parallel_attention(
            query, key, value, *given, forward_op=with_all_tokens, backward_op=_native_attention_backward_op,
            _parallel_config=_parallel_config,
        )  # fmt: skip
        return gathered


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


def dispatches(processor: Any) -> bool:
    """Whether a processor calls diffusers' dispatcher, which one that derives from such a class may not do."""
    for kind in type(processor).__mro__ if hasattr(processor, BACKEND) else ():
        if isinstance(call := inspect.unwrap(vars(kind).get("__call__", kind)), FunctionType):
            names = call.__code__.co_names
            if dispatch_attention_fn.__name__ in names or "super" not in names:
                return dispatch_attention_fn.__name__ in names
    return False


def stand_in(processor: Any, to: DispatcherBackend | Redirect) -> Any:
    """A copy of `processor` whose attention goes to a backend or a redirect; copies of it are of `processor`."""
    kind: Any = type(processor)
    twin: Any = object.__new__(_kind(kind, redirected=isinstance(to, Redirect)))
    vars(twin).update(vars(processor))
    vars(twin)[OWN] = processor
    vars(twin).update({REDIRECT: to} if isinstance(to, Redirect) else {BACKEND: to.name})
    return twin


def own_of(twin: Any) -> Any:
    """The processor for which `twin` stands in, with what was set since, such as the scale of an IP adapter."""
    added = BACKEND, OWN, REDIRECT
    vars(twin.stands_in_for).update({name: value for name, value in vars(twin).items() if name not in added})
    return twin.stands_in_for


@cache
def _kind(kind: Any, *, redirected: bool) -> Any:
    """A subclass of a class of processors, one for all layers, so that compiled code serves all of them."""

    def call_redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Redirected(self.redirected_to) as mode:
            out = kind.__call__(self, *args, **kwargs)
        if not (torch.compiler.is_compiling() or mode.used):
            raise RuntimeError(
                f"{kind.__name__} computed attention without PyTorch's scaled_dot_product_attention or diffusers' "
                "dispatcher. No pipeline can replace it. Give its modules another processor, or diffusers the "
                "backend 'native'."
            )
        return out

    # Models ask for the names of the arguments that a processor takes, and find them through this attribute.
    call_redirected.__wrapped__ = kind.__call__  # type: ignore[attr-defined]
    methods: dict[str, Any] = {
        "__deepcopy__": lambda self, memo: deepcopy(own_of(self), memo),
        "__reduce__": lambda self: (copy, (own_of(self),)),
        "__module__": kind.__module__,
    }
    twins: Any = type(kind.__name__, (kind,), methods | ({"__call__": call_redirected} if redirected else {}))
    # Guidance that skips attention looks up how, by the class.
    AttentionProcessorRegistry._register()
    if kind in AttentionProcessorRegistry._registry:
        AttentionProcessorRegistry.register(twins, AttentionProcessorRegistry.get(kind))
    return twins

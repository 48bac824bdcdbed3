"""Every name of PyTorch that is not public, in this one file: PyTorch may rename or drop any of them.

PyTorch 2.11 to 2.15 have them all, and no public name for any; objects in graphs were renamed in 2.14. Operators,
`torch.ops.aten._...`, are not in it: saved models name them, so they stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef
    from torch._opaque_base import OpaqueBase as OpaqueBase
    from torch._ops import OpOverload as OpOverload
else:
    OpOverload = type(torch.ops.aten.empty_like.default)

# Objects that a graph takes as inputs. Later names come first: the older ones warn, or are no longer there.
_REGISTER: Callable[..., None]
try:
    from torch._C._functorch import peek_interpreter_stack
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map

    if not TYPE_CHECKING:
        try:
            from torch._custom_class_base import CustomClassBase as OpaqueBase  # PyTorch 2.14
            from torch._library.opaque_object import register_custom_class

            _REGISTER = functools.partial(register_custom_class, typ="symbolic")
        except ImportError:
            from torch._library.opaque_object import register_opaque_type
            from torch._opaque_base import OpaqueBase as OpaqueBase

            _REGISTER = functools.partial(register_opaque_type, typ="reference", hoist=True)
except ImportError as error:
    raise ImportError(
        f"blocksparse was tested with PyTorch 2.11 and 2.13 to 2.15, and this is {torch.__version__}: {error}"
    ) from None


def operations_are_noted() -> bool:
    """Whether something takes down PyTorch's operations, as `make_fx` does, and so misses what is none of them."""
    return torch._C._get_tracing_state() is not None or under_a_dispatch_mode()


def opaque_object(kind: type) -> None:
    """Let graphs of torch.compile take objects of this type as inputs, compared by identity.

    Such an object is not a constant of the graph, and so no part of the key of cached graphs. Before 2.14 that has
    to be asked for (`hoist`).
    """
    _REGISTER(kind)


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """As `torch.library.custom_op(name, mutates_args=())`, for an op that takes opaque objects."""
    return torch.library.custom_op(name, mutates_args=())


def under_a_transform() -> bool:
    """Whether a transform of `torch.func` is active."""
    return peek_interpreter_stack() is not None


def under_forward_mode() -> bool:
    """Whether tensors may have tangents of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation follows one of these. Without it this asks no tensor, which is slow."""
    return under_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def under_a_function_mode() -> bool:
    """Whether a mode other than `with torch.device(...)` changes functions."""
    if not torch._C._len_torch_function_stack():  # as nearly always
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def under_a_dispatch_mode() -> bool:
    """Whether a mode sees PyTorch's operations."""
    return _get_current_dispatch_mode() is not None


def compile_disabled() -> bool:
    """Whether torch.compile is known to be switched off; to ask Dynamo is quicker than to try."""
    return bool(torch._dynamo.config.disable)


def many_variants(limit: int) -> AbstractContextManager[object]:
    """A context in which torch.compile compiles a function up to `limit` times; its own limit is 8."""
    config: Any = torch.compiler.config
    patched: AbstractContextManager[object] = config.patch(recompile_limit=limit)
    return patched


def of_static_shape(x: Tensor) -> Tensor:
    """`x`, the sizes of which torch.compile takes for constants."""
    torch._dynamo.mark_static(x)
    return x


@functools.cache
def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile uses on a CPU, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None

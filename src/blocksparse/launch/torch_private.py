"""Every name of PyTorch that is not public, in this one file: PyTorch may rename or drop any of them.

None is needed to import this library. Each is taken where PyTorch has it. Without it, what needs it is off, and
says so where it is asked for:

| name in `torch` | off without it |
|---|---|
| `_library.opaque_object`, `_custom_class_base` (`_opaque_base`) | calls under torch.compile and torch.func |
| `_C._get_tracing_state` | the compiled kernels for CPUs |
| `_C._functorch.peek_interpreter_stack` | calls under torch.func: PyTorch says that its stand-ins have no memory |
| `autograd.forward_ad._current_level` | repeated calls |
| `overrides._get_current_function_mode_stack`, `utils._device` | repeated calls |
| `utils._python_dispatch`, `utils._pytree` | repeated calls, `FlexExecutor`, changes of a prompt's mask |
| `_dynamo.config.disable` | nothing: torch.compile is tried instead |
| `_dynamo.mark_static` | `FlexExecutor` |
| `_inductor.cpp_builder`, `_inductor.exc` | `FlexExecutor` on a CPU |

Operators, `torch.ops.aten._...`, are not in it: saved models name them, so they stay. No version up to PyTorch
2.15 has a public name for any of these, and all from 2.11 on have these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload as OpOverload
else:
    OpOverload = type(torch.ops.aten.empty_like.default)

_LACKS = f"PyTorch {torch.__version__} lacks"

# Objects that a graph takes as inputs. Later names come first: the older ones warn, or are no longer there.
NO_OPAQUE_OBJECTS: str | None = None
_REGISTER: Callable[..., None]
if TYPE_CHECKING:
    from torch._opaque_base import OpaqueBase as OpaqueBase
else:
    try:
        from torch._custom_class_base import CustomClassBase as OpaqueBase  # PyTorch 2.14
        from torch._library.opaque_object import register_custom_class

        _REGISTER = functools.partial(register_custom_class, typ="symbolic")
    except ImportError:
        try:
            from torch._library.opaque_object import register_opaque_type
            from torch._opaque_base import OpaqueBase

            _REGISTER = functools.partial(register_opaque_type, typ="reference", hoist=True)
        except ImportError:
            OpaqueBase, NO_OPAQUE_OBJECTS = object, f"{_LACKS} torch._library.opaque_object"

# What PyTorch does below its functions.
try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map

    NO_DISPATCH_MODES = None
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Stands for a mode that sees operations, and sees none."""

        def __enter__(self) -> TorchDispatchMode:
            raise RuntimeError(f"{NO_DISPATCH_MODES}, so operations cannot be seen")

        def __exit__(self, *_: object) -> None: ...

    def tree_map(*_: Any) -> Any:  # type: ignore[misc]
        raise RuntimeError(f"{NO_DISPATCH_MODES}, so arguments of operations cannot be changed")

    def tree_leaves(*_: Any) -> Any:  # type: ignore[misc]
        raise RuntimeError(f"{NO_DISPATCH_MODES}, so operations cannot be seen")

    NO_DISPATCH_MODES = f"{_LACKS} torch.utils._python_dispatch or torch.utils._pytree"


def operations_are_noted() -> bool:
    """Whether something takes down PyTorch's operations, as `make_fx` does, and so misses what is none of them.

    True where PyTorch does not tell.
    """
    return _tracing is None or _tracing() is not None or under_a_dispatch_mode()


_tracing: Callable[[], object] | None = getattr(torch._C, "_get_tracing_state", None)


def opaque_object(kind: type) -> None:
    """Let graphs of torch.compile take objects of this type as inputs, compared by identity.

    Such an object is not a constant of the graph, and so no part of the key of cached graphs. Before 2.14 that has
    to be asked for (`hoist`).
    """
    if NO_OPAQUE_OBJECTS is None:
        _REGISTER(kind)


def graph_node(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """As `torch.library.custom_op(name, mutates_args=())`, for an op that takes opaque objects."""
    if NO_OPAQUE_OBJECTS is None:
        return torch.library.custom_op(name, mutates_args=())
    return cast("Callable[[Callable[..., Any]], CustomOpDef]", _NoNode)


@final
class _NoNode:
    """Stands for an op that cannot be made."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        return fake

    def __call__(self, *_: Any) -> Any:
        raise ValueError(
            f"{NO_OPAQUE_OBJECTS}, so torch.compile and torch.func cannot take calls of blocksparse: "
            "leave them out, or install PyTorch 2.11 to 2.15"
        )


def under_a_transform() -> bool:
    """Whether a transform of `torch.func` is active; False where PyTorch does not tell."""
    return _peek is not None and _peek() is not None


try:
    from torch._C._functorch import peek_interpreter_stack as _peek
except ImportError:
    _peek = None  # type: ignore[assignment]


def under_forward_mode() -> bool:
    """Whether tensors may have tangents of forward-mode differentiation; True where PyTorch does not tell."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def under_a_function_mode() -> bool:
    """Whether a mode other than `with torch.device(...)` changes functions; True where PyTorch does not tell."""
    return _function_modes is None or any(type(mode) is not DeviceContext for mode in _function_modes())


try:
    from torch.overrides import _get_current_function_mode_stack as _function_modes
    from torch.utils._device import DeviceContext
except ImportError:
    _function_modes = None  # type: ignore[assignment]


def under_a_dispatch_mode() -> bool:
    """Whether a mode sees PyTorch's operations; False where PyTorch does not tell, as `no_questions` then says."""
    return _dispatch_mode is not None and _dispatch_mode() is not None


try:
    from torch.utils._python_dispatch import _get_current_dispatch_mode as _dispatch_mode
except ImportError:
    _dispatch_mode = None  # type: ignore[assignment]


def no_questions() -> str | None:
    """Which name is missing of those that tell whether torch.compile compiles, and for which shapes; or None."""
    if _dispatch_mode is None:
        return f"{_LACKS} torch.utils._python_dispatch._get_current_dispatch_mode"
    return None if hasattr(torch._dynamo, "mark_static") else f"{_LACKS} torch._dynamo.mark_static"


def compile_disabled() -> bool:
    """Whether torch.compile is known to be switched off; to ask Dynamo is quicker than to try."""
    return bool(getattr(getattr(torch._dynamo, "config", None), "disable", False))


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
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:
        return None
    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None

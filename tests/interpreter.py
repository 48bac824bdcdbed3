"""Triton's interpreter without the work that it does again for every operation, and with the same results.

It makes the type of a tensor, and the shape and the numpy type that follow from it, anew for every operation. That
takes most of its time where tensors are as small as in these tests. Here each is made once and kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def interpret_faster() -> None:
    """Change the interpreter of this process; nothing is done with another Triton than this is written for."""
    try:
        from triton import language
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # another Triton than 3.7, and no public names for this
        return
    _prepare_once(language, interpreter)
    _keep_numpy_types(interpreter)
    _keep_types(core)
    _keep_shapes(core)
    _skip_what_changes_nothing(TritonSemantic)
    # Sums of int32 cannot overflow with so few tokens, and asking whether they do takes a quarter of the time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _prepare_once(language: Any, interpreter: Any) -> None:
    """Prepare `triton.language` for the outermost function only: those that it calls find it prepared."""
    prepare = interpreter._patch_lang
    # By the globals of a function, which are kept alive: those of them that are `triton.language`.
    seen: dict[int, tuple[Any, list[Any]]] = {}

    def unless_done(fn: Any) -> Any:
        _, modules = seen.get(id(fn.__globals__), (None, None))
        if modules is None:
            modules = [x for x in fn.__globals__.values() if x is language or x is language.core]
            seen[id(fn.__globals__)] = fn.__globals__, modules
        if any(language.core.is_builtin(module.load) for module in modules):
            return prepare(fn)
        return interpreter._LangPatchScope()

    def call_with_semantic(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    semantic = interpreter.interpreter_semantic
    interpreter._patch_lang = unless_done
    interpreter._patch_attr = call_with_semantic


def _keep_numpy_types(interpreter: Any) -> None:
    find = interpreter._get_np_dtype
    kept: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in kept:
            kept[name] = find(of)
        return kept[name]

    interpreter._get_np_dtype = numpy_type


def _keep_types(core: Any) -> None:
    """What a block type consists of, by the type and the shape that it is made of."""
    make, constexpr = core.block_type.__init__, core.constexpr
    kept: dict[tuple[Any, ...], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[x.value if isinstance(x, constexpr) else x for x in shape]
        parts = kept.get(key)
        if parts is None:
            make(self, element_ty, shape)
            kept[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = parts

    def to_ir(self: Any, builder: Any) -> Any:
        self.element_ty.to_ir(builder)  # says so where there is none
        return self

    core.block_type.__init__ = init
    core.block_type.to_ir = to_ir


def _keep_shapes(core: Any) -> None:
    """A tensor's shape as constants, and their product, by the shape of its type."""
    make = core.tensor.__init__
    kept: dict[tuple[int, ...], Any] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape.values,) if type.is_block() else ()
        parts = kept.get(key)
        if parts is None:
            make(self, handle, type)
            kept[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = parts

    core.tensor.__init__ = init


def _skip_what_changes_nothing(semantic: Any) -> None:
    """Casts to the type that a tensor has, and broadcasts to its shape; and what two types compute in is kept."""
    broadcast, cast, find = semantic.broadcast_impl_value, semantic.cast, semantic.computation_type_impl
    kept: dict[tuple[Any, ...], Any] = {}

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        blocks = one.is_block(), other.is_block()
        if blocks == (False, False) or (blocks == (True, True) and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_unless_equal(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.type.scalar is dst_ty.scalar else cast(self, input, dst_ty, fp_downcast_rounding)

    def computed_in(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in kept:
            kept[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return kept[key]

    semantic.broadcast_impl_value = broadcast_unless_equal
    semantic.cast = cast_unless_equal
    semantic.computation_type_impl = computed_in

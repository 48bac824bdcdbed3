"""Triton's interpreter without the work that it does again for every operation, and with the same results.

It makes the type of a tensor, and the shape and the numpy type that follow from it, anew for every operation. That
takes most of its time where tensors are as small as in these tests. Here each is made once and kept, and what an
operation comes to is found once for operands of such types: later ones go to numpy at once.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Data = Any  # numpy's arrays, of any type
Operation = Callable[..., Data]


def interpret_faster() -> None:
    """Change the interpreter of this process; nothing is done with another Triton than this is written for."""
    try:
        from triton import language
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # in Triton 3.6 to 3.9, and no public names for this
        return
    _read_numbers(interpreter)
    _keep_numpy_types(interpreter)
    _unwrap_at_once(core)
    _keep_types(core)
    _keep_shapes(core)
    _skip_what_changes_nothing(TritonSemantic)
    _keep_constants(interpreter, TritonSemantic)
    plans = _Plans(interpreter, core)
    plans.take_over(TritonSemantic)
    _prepare_once(language, interpreter, plans.members(core.tensor))
    # Sums of int32 cannot overflow with so few tokens, and asking whether they do takes a quarter of the time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _read_numbers(interpreter: Any) -> None:
    """Triton 3.6 has NumPy take an array of one for a number, which NumPy 2.4 refuses."""
    prepare = interpreter._patch_lang_tensor

    def with_numbers(tensor: Any, scope: Any) -> None:
        prepare(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_numbers


def _prepare_once(language: Any, interpreter: Any, members: dict[str, Operation]) -> None:
    """Prepare `triton.language` for the outermost function only: those that it calls find it prepared.

    `members` are what takes the place of operators of a tensor.
    """
    prepare = interpreter._patch_lang
    # By the globals of a function, which are kept alive: those of them that are `triton.language`.
    seen: dict[int, tuple[Any, list[Any]]] = {}

    def unless_done(fn: Any) -> Any:
        _, modules = seen.get(id(fn.__globals__), (None, None))
        if modules is None:
            modules = [x for x in fn.__globals__.values() if x is language or x is language.core]
            seen[id(fn.__globals__)] = fn.__globals__, modules
        for module in modules:
            if is_builtin(module.load):
                return prepare(fn)
        return interpreter._LangPatchScope()

    def call_with_semantic(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        member = getattr(member, "__wrapped__", member)  # around it is only a check that there is a semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, members[name] if obj is tensor and name in members else call)

    semantic, tensor = interpreter.interpreter_semantic, language.core.tensor
    is_builtin = language.core.is_builtin
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


def _unwrap_at_once(core: Any) -> None:
    """A constant's value, without asking four times what most operands are not."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    bare = {core.tensor, int, float, bool, str, type(None)}

    def value(o: Any) -> Any:
        if o.__class__ in bare:
            return o
        return o.value if o.__class__ is constexpr else unwrap(o)

    core._unwrap_if_constexpr = value


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
    """Broadcasts to the shape that a tensor has; and what two types compute in is kept."""
    broadcast, find = semantic.broadcast_impl_value, semantic.computation_type_impl
    kept: dict[tuple[Any, ...], Any] = {}

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        blocks = one.is_block(), other.is_block()
        if blocks == (False, False) or (blocks == (True, True) and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def computed_in(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in kept:
            kept[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return kept[key]

    semantic.broadcast_impl_value = broadcast_unless_equal
    semantic.computation_type_impl = computed_in


def _keep_constants(interpreter: Any, semantic: Any) -> None:
    """The numbers of a scalar by its value and type; nobody writes into them."""
    make, handle = semantic.scalar_constant, interpreter.TensorHandle
    kept: dict[tuple[Any, ...], Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or value.__class__ not in (int, float, bool):
            return make(self, value, dtype)
        key = value.__class__, value, dtype.name
        data = kept.get(key)
        if data is None:
            found = make(self, value, dtype)
            data = kept[key] = found.handle.data
            data.setflags(write=False)
        return self.tensor(handle(data, dtype), dtype)

    semantic.scalar_constant = scalar_constant


def _divide(a: Data, b: Data) -> Data:
    """Division of integers that rounds towards zero, as the interpreter has it."""
    return (a - np.fmod(a, b)) // b


ARITHMETIC: dict[str, Operation] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _divide,
    "mod": np.fmod,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor_": np.bitwise_xor,
    "shl": np.left_shift,
    "lshr": np.right_shift,
}
COMPARISONS: dict[str, Operation] = {"greater_than": np.greater, "less_than": np.less}
COMPARISONS |= {name: getattr(np, name) for name in ("greater_equal", "less_equal", "equal", "not_equal")}
OPERATORS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{f"__{name}__": f"{name}_" for name in ("and", "or", "xor")},
    "__gt__": "greater_than",
    "__ge__": "greater_equal",
    "__lt__": "less_than",
    "__le__": "less_equal",
    "__eq__": "equal",
    "__ne__": "not_equal",
}
NUMBERS = (int, float, bool)
# What numpy has under this name; others are kept as bits.
PLAIN = ("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64")


class _Plans:
    """Operations by the types of their operands, found when such are first met and then checked against Triton's.

    What one does not cover (fp8, bfloat16 that has to be converted, errors) goes Triton's way each time.
    """

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.tensor, self.handle = core.tensor, interpreter.TensorHandle
        self.semantic = interpreter.interpreter_semantic
        self.constexpr = core.constexpr
        self.numpy_type = interpreter._get_np_dtype
        self.load_from = interpreter._interpreter.load

    def take_over(self, semantic: Any) -> None:
        for name, function in ARITHMETIC.items():
            div = name in ("truediv", "floordiv", "mod")
            setattr(semantic, name, self.binary(getattr(semantic, name), function, div=div))
        for name, function in COMPARISONS.items():
            setattr(semantic, name, self.binary(getattr(semantic, name), function, compares=True))
        semantic.where = self.where(semantic.where)
        semantic.cast = self.cast(semantic.cast)
        semantic.load = self.load(semantic.load)

    def members(self, tensor: Any) -> dict[str, Operation]:
        """Operators of a tensor that ask for a plan without the layers between."""
        semantic, constexpr = self.semantic, self.constexpr
        found: dict[str, Operation] = {}
        for member, name in OPERATORS.items():
            function = getattr(type(semantic), name)
            rest = (True,) if name in ("add", "sub", "mul") else ()

            def forward(a: Any, b: Any, function: Operation = function, rest: tuple[bool, ...] = rest) -> Any:
                return function(semantic, a, b.value if b.__class__ is constexpr else b, *rest)

            def reverse(a: Any, b: Any, function: Operation = function, rest: tuple[bool, ...] = rest) -> Any:
                return function(semantic, b.value if b.__class__ is constexpr else b, a, *rest)

            found[member], found[f"__r{member[2:]}"] = forward, reverse
        found["__getitem__"] = self.getitem(tensor.__getitem__)
        return found

    def made(self, data: Data, like: tuple[Any, ...]) -> Any:
        """A tensor of these numbers, otherwise as `describe` says."""
        handle, result = object.__new__(self.handle), object.__new__(self.tensor)
        handle.data, handle.attr = data, {}
        handle.dtype, result.type, result.dtype, result.shape, result.numel = like
        result.handle = handle
        return result

    def learn(
        self, plans: dict[Any, Any], key: Any, find: Operation, run: Operation, operands: Any, result: Any
    ) -> None:
        """Keep the plan for such operands if it gives `result`, which is Triton's; else None, for good."""
        if key not in plans:
            plan = find(*operands, result)
            plans[key] = plan if plan is not None and _same(run(*operands, plan), result) else None

    def describe(self, result: Any) -> tuple[Any, ...]:
        return result.handle.dtype, result.type, result.dtype, result.shape, result.numel

    def key(self, x: Any) -> Any:
        if x.__class__ is self.tensor:
            return x.type.name
        return (x.__class__, x) if x.__class__ in NUMBERS else None

    def operand(self, x: Any, dtype: Any, *, converts: bool = True) -> tuple[Any, Any] | None:
        """What it takes to have `x` as `dtype`: its numbers if they are known, and the type to convert them to."""
        if x.__class__ is not self.tensor:
            return self.semantic.scalar_constant(x, dtype).handle.data, None
        if x.type.scalar.name == dtype.name:
            return None, None
        return (None, self.numpy_type(dtype)) if converts and x.type.scalar.name in PLAIN else None

    def binary(
        self, triton: Operation, function: Operation, *, div: bool = False, compares: bool = False
    ) -> Operation:
        key_of, made, pointers = self.key, self.made, triton.__name__ == "add"
        plans: dict[tuple[Any, Any], Any] = {}

        def find(a: Any, b: Any, result: Any) -> Any:
            types = [(x if x.__class__ is self.tensor else self.semantic.to_tensor(x)).type.scalar for x in (a, b)]
            if pointers and types[0].is_ptr() and types[1].is_int():
                size = max(1, a.handle.get_element_ty().primitive_bitwidth // 8)
                offset = self.operand(b, types[1])
                assert offset is not None
                moved = (lambda x, y: x + size * y.astype(np.uint64)), (None, None), offset
                return *moved, self.describe(result)
            if any(x.name not in PLAIN for x in types):
                return None
            scalars = [x.__class__ is not self.tensor and not compares for x in (a, b)]
            dtype = self.semantic.computation_type_impl(types[0], scalars[0], types[1], scalars[1], div)
            if dtype.name not in PLAIN or (dtype.is_int() and function is np.divide):
                return None
            parts = self.operand(a, dtype), self.operand(b, dtype)
            return None if None in parts else (function, *parts, self.describe(result))

        def run(a: Any, b: Any, plan: Any) -> Any:
            apply, (x, as_x), (y, as_y), like = plan
            if x is None:
                x = a.handle.data
                if as_x is not None:
                    x = x.astype(as_x)
            if y is None:
                y = b.handle.data
                if as_y is not None:
                    y = y.astype(as_y)
            return made(apply(x, y), like)

        def operation(semantic: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
            key = key_of(a), key_of(b)
            plan = plans.get(key)
            if plan is not None:
                return run(a, b, plan)
            if compares:  # as the operators of a tensor have it
                result = triton(semantic, semantic.to_tensor(a), semantic.to_tensor(b))
            else:
                result = triton(semantic, a, b, *rest, **named)
            if None not in key:
                self.learn(plans, key, find, run, (a, b), result)
            return result

        return operation

    def where(self, triton: Operation) -> Operation:
        key_of, made = self.key, self.made
        plans: dict[tuple[Any, Any, Any], Any] = {}

        def find(condition: Any, a: Any, b: Any, result: Any) -> Any:
            if condition.type.scalar.name != "int1" or result.type.scalar.is_ptr():
                return None
            dtype = result.type.scalar
            parts = [self.operand(x, dtype, converts=dtype.name in PLAIN) for x in (a, b)]
            return None if None in parts else (*parts, self.describe(result))

        def run(condition: Any, a: Any, b: Any, plan: Any) -> Any:
            (x, as_x), (y, as_y), like = plan
            if x is None:
                x = a.handle.data if as_x is None else a.handle.data.astype(as_x)
            if y is None:
                y = b.handle.data if as_y is None else b.handle.data.astype(as_y)
            return made(np.where(condition.handle.data, x, y), like)

        def operation(semantic: Any, condition: Any, x: Any, y: Any) -> Any:
            key = key_of(condition), key_of(x), key_of(y)
            plan = plans.get(key)
            if plan is not None:
                return run(condition, x, y, plan)
            result = triton(semantic, condition, x, y)
            if None not in key:
                self.learn(plans, key, find, run, (condition, x, y), result)
            return result

        return operation

    def cast(self, triton: Operation) -> Operation:
        made = self.made
        plans: dict[tuple[str, str], Any] = {}

        def operation(semantic: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
            if input.type.scalar is dst_ty.scalar:
                return input
            if fp_downcast_rounding is not None:
                return triton(semantic, input, dst_ty, fp_downcast_rounding)
            key = input.type.name, dst_ty.scalar.name
            plan = plans.get(key)
            if plan is not None:
                return made(input.handle.data.astype(plan[0]), plan[1])
            result = triton(semantic, input, dst_ty)
            if key not in plans and input.type.scalar.name in PLAIN and key[1] in PLAIN and key[1] != "int1":
                into = self.numpy_type(dst_ty)
                same = _same(made(input.handle.data.astype(into), self.describe(result)), result)
                plans[key] = (into, self.describe(result)) if same else None
            return result

        return operation

    def load(self, triton: Operation) -> Operation:
        """Loads through pointers, with a mask: `other` is a number, or not given."""
        key_of, made, load = self.key, self.made, self.load_from
        plans: dict[tuple[Any, Any, Any], Any] = {}

        def find(ptr: Any, other: Any, result: Any) -> Any:
            to = ptr.type.scalar
            # Blocks behind a pointer, and bools, which are read as int8, go Triton's way.
            if not to.is_ptr() or to.element_ty.is_block() or to.element_ty.name == "int1":
                return None
            shape = result.handle.data.shape
            filling = np.zeros(shape, dtype=result.handle.data.dtype)
            if other is not None:
                filling[...] = self.semantic.cast(other, to.element_ty).handle.data
            filling.setflags(write=False)
            return shape, filling, self.numpy_type(to.element_ty), self.describe(result)

        def run(ptr: Any, mask: Any, plan: Any) -> Any:
            shape, filling, dtype, like = plan
            at, where = ptr.handle.data, mask.handle.data
            if at.shape != shape:
                at = np.broadcast_to(at, shape)
            if where.shape != shape:
                where = np.broadcast_to(where, shape)
            return made(load(at, where, filling, dtype), like)

        def operation(semantic: Any, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
            known = other is None or not other.type.is_block()
            if mask is None or not known or rest[0] or rest[1]:
                return triton(semantic, ptr, mask, other, *rest)
            value = None if other is None else (other.type.name, other.handle.data.tobytes())
            key = key_of(ptr), key_of(mask), value
            plan = plans.get(key)
            if plan is not None:
                return run(ptr, mask, plan)
            result = triton(semantic, ptr, mask, other, *rest)
            if mask.type.scalar.name == "int1":
                self.learn(plans, key, lambda ptr, _, result: find(ptr, other, result), run, (ptr, mask), result)
            return result

        return operation

    def getitem(self, triton: Operation) -> Operation:
        """New axes, as in `x[:, None]`."""
        made, semantic = self.made, self.semantic
        plans: dict[tuple[str, tuple[bool, ...]], Any] = {}

        def operation(x: Any, slices: Any) -> Any:
            if slices.__class__ is not tuple or any(s is not None and s != slice(None) for s in slices):
                return triton(x, slices, _semantic=semantic)
            key = x.type.name, tuple(s is None for s in slices)
            plan = plans.get(key)
            if plan is None:
                result = triton(x, slices, _semantic=semantic)
                if x.type.is_block():
                    plans[key] = result.handle.data.shape, self.describe(result)
                return result
            return made(x.handle.data.reshape(plan[0]), plan[1])

        return operation


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same numbers, bit for bit."""
    a, b = one.handle.data, other.handle.data
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def note_launches() -> None:
    """Captures see interpreted launches, which can be replayed with addresses instead of tensors."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return
    interpreted = InterpretedFunction.__getitem__

    def launcher(self: Any, grid: Any) -> Callable[..., None]:
        run = interpreted(self, grid)

        def launch(*args: Any, **named: Any) -> None:
            from blocksparse.launch.launch_graph import current_capture

            with _disable_current_modes():  # the interpreter reads and writes tensors by PyTorch
                run(*args, **named)
            if (capture := current_capture.get()) is not None:
                back = _from_address(args)
                capture.launched(lambda *now: launch(*back(now), **named), args)

        return launch

    InterpretedFunction.__getitem__ = launcher


def _from_address(like: Any) -> Callable[[Any], Any]:
    """What gives an argument like `like`, if the address of its first entry takes its place."""
    if hasattr(like, "base") and hasattr(like, "block_shape"):
        of_base = _from_address(like.base)

        def described(x: Any) -> Any:
            x = copy.copy(x)
            if not isinstance(x.base, Tensor):  # an address
                x.base = of_base(x.base.data_ptr())
            return x

        return described
    if isinstance(like, tuple):
        parts = [_from_address(x) for x in like]
        return lambda now: tuple(f(x) for f, x in zip(parts, now, strict=True))
    if not isinstance(like, Tensor):
        return lambda x: x
    dtype, shape, strides = like.dtype, like.shape, like.stride()
    entries = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    def tensor(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x
        memory = (ctypes.c_byte * (entries * dtype.itemsize)).from_address(x)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    return tensor

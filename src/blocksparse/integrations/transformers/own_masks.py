"""Which modules do arithmetic on a mask by themselves, and so need the numbers that "eager" masks hold."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_ASKS = "ALL_ATTENTION_FUNCTIONS"
_VIEWS = {"unsqueeze", "transpose", "view", "expand", "permute", "reshape", "squeeze"}


def asks_for_its_function(module: type[nn.Module]) -> bool:
    """Whether a module calls the function that transformers has under the name in its config.

    What a class says of itself (`_supports_attention_backend`) is missing in many models that do. So this looks at
    which names the forward of the module uses.
    """
    forward = inspect.unwrap(module.forward)
    return isinstance(forward, FunctionType) and _ASKS in forward.__code__.co_names


def uses_own_masks(module: type[nn.Module]) -> str | None:
    """The name of the class that does arithmetic on a mask, or None: `module`, or one that it may turn into.

    A module that asks transformers for its function leaves the mask to that function. BigBirdPegasus changes the
    class of its attention in a call, so the classes that other methods than `__init__` name count too.
    """
    named = (
        method.__globals__.get(name)
        for method in _methods(module)
        if method.__name__ != "__init__"
        for name in method.__code__.co_names
    )
    for part in (module, *named):
        if not (isinstance(part, type) and issubclass(part, nn.Module)):
            continue
        ours = part.__module__ == module.__module__ and not asks_for_its_function(part)
        if ours and any(map(_reads, _methods(part))):
            return part.__name__
    return None


def reads_as_numbers(function: ast.FunctionDef) -> bool:
    """Whether a function adds a mask that it is given, or takes a row of it, and never asks for bools."""
    masks = {x.arg for x in (*function.args.args, *function.args.kwonlyargs) if x.arg.endswith("mask")}
    nodes = list(ast.walk(function))
    if not masks or any(isinstance(x, ast.Attribute) and ast.unparse(x) == "torch.bool" for x in nodes):
        return False
    made = {  # a name and the line from which on it is another mask, which the function makes itself
        (target.id, node.lineno)
        for node in nodes
        if isinstance(node, ast.Assign) and not _is_one_of(masks, node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add):
            parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
            for name in masks.intersection(map(_viewed, parts)):
                if not any(name == other and line <= node.lineno for other, line in made):
                    return True
        if isinstance(node, ast.Subscript) and _viewed(node) in masks and _is_row(node.slice):
            return True
    return False


def _is_one_of(masks: set[str], value: ast.expr) -> bool:
    choices = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
    return any(_viewed(x) in masks for x in choices)


def _is_row(index: ast.expr) -> bool:
    """Whether an index takes the row of one query from a mask `[B, H, M, N]`."""
    if not isinstance(index, ast.Tuple) or len(index.elts) != 4:
        return False
    batch, heads, query, keys = index.elts
    return all(isinstance(x, ast.Slice) for x in (batch, heads, keys)) and not isinstance(query, ast.Slice)


def _viewed(node: ast.expr) -> str:
    """The name of the tensor of which an expression is a part or a view, or nothing."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            node = node.func.value
        else:
            return ""
    return node.id


def _methods(module: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions of a class and its bases, as far as they are not PyTorch's."""
    for owner in module.__mro__:
        if issubclass(owner, nn.Module) and not owner.__module__.startswith("torch."):
            given = (inspect.unwrap(x) for x in vars(owner).values() if callable(x))
            yield from (x for x in given if isinstance(x, FunctionType))


def _reads(method: FunctionType) -> bool:
    names = method.__code__.co_varnames[: method.__code__.co_argcount + method.__code__.co_kwonlyargcount]
    if not any(name.endswith("mask") for name in names):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # without its source nothing is known
        return False
    return any(isinstance(x, ast.FunctionDef) and reads_as_numbers(x) for x in tree.body)

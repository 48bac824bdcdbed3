"""Presets by their names: in a plan, in an engine's configuration and on a command line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from importlib import import_module
from operator import or_
from typing import Any

from attrs import evolve

from blocksparse.check.validators import UserError, shown
from blocksparse.execute.auto import AutoExecutor
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.pipeline import Pipeline
from blocksparse.presets import every_preset
from blocksparse.select.positions import Band, LastQueries, Sink
from blocksparse.select.selector import PositionSelector

_RULES: dict[str, Callable[..., PositionSelector]] = {"Band": Band, "Sink": Sink, "LastQueries": LastQueries}

_OWN = re.compile(r"\s*([\w.]+):(\w+)")


def preset_named(name: object) -> Callable[..., AnyPipeline]:
    """The preset for text of this name."""
    if name not in list(every_preset):  # a list, because JSON may hold what no dict can look up
        raise ValueError(f"there is no preset {shown(name)}. There are {', '.join(every_preset)}.")
    return every_preset[str(name)]


def maker(name: object) -> Callable[..., AnyPipeline]:
    """The preset of a name, or the user's own function of `"module:function"`, whose result is checked.

    Raises:
        TypeError, ValueError: there is no such preset, module or function; or, when it is called, the function
            returns no pipeline.
    """
    module, colon, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not colon:
        return preset_named(name)
    if not all(map(str.isidentifier, (*module.split("."), function))):
        raise ValueError(f"there is no preset {shown(name)}. A function is named as in 'my_stages:mine'.")
    try:
        found = getattr(import_module(module), function, None)
    except ImportError as error:
        raise ValueError(
            f"there is no preset {shown(name)}: {error}. Add the folder of the module to PYTHONPATH."
        ) from None
    if found is None:
        raise ValueError(
            f"there is no preset {shown(name)}. Define a function {shown(function)} in the module {shown(module)}."
        )
    if not callable(found):
        raise TypeError(f"{shown(name)} must be a function that returns a Pipeline: {shown(found)}")
    own: Callable[..., object] = found

    def checked(*values: Any, **named: Any) -> AnyPipeline:
        pipeline = own(*values, **named)
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"{shown(name)} must return a Pipeline: {shown(pipeline)}")
        return pipeline

    return checked


def extended(pipeline: AnyPipeline, rules: Sequence[PositionSelector]) -> AnyPipeline:
    """The same pipeline, which also keeps what each of `rules` keeps: in one launch for all of them."""
    return pipeline | reduce(or_, rules) if rules else pipeline


def always_sparse(pipeline: AnyPipeline) -> AnyPipeline:
    """The same pipeline, which selects at any length, also where `AutoExecutor` would attend densely."""
    executor = pipeline.executor
    if not isinstance(executor, AutoExecutor):
        return pipeline
    return evolve(pipeline, executor=evolve(executor, dense_below=0))


def names_function(text: str) -> bool:
    """Whether text begins with `module:function`, which is no Python."""
    return _OWN.match(text) is not None


def read(text: str, option: str) -> AnyPipeline:
    """The pipeline of a preset or of a function of the user's, with arguments and position selectors if given.

    Such as `pbs_attn`, `pbs_attn(0.95, block=64) | Band(128)` and `my_stages:mine(k=64)`. Arguments are literals.
    A module may lie in the current folder.

    Args:
        option: the option of the command that the text is from, for errors.

    Raises:
        UserError: no such preset, module or function; or it refuses the arguments, or returns no pipeline.
    """
    known: Mapping[str, Callable[..., AnyPipeline]] = every_preset
    python = text
    if own := _OWN.match(text):
        if "" not in sys.path:
            sys.path.append("")  # an installed command does not have the current folder there, as `python -m` has
        name = f"{own[1]}.{own[2]}"
        try:
            known = {name: maker(f"{own[1]}:{own[2]}")}
        except (TypeError, ValueError) as error:
            raise UserError(f"'{option}': {error}") from None
        python = name + text[own.end() :]
    try:
        first: ast.expr = ast.parse(python.strip(), mode="eval").body
        rules: list[ast.expr] = []
        while isinstance(first, ast.BinOp) and isinstance(first.op, ast.BitOr):
            rules.insert(0, first.right)
            first = first.left
        preset, also = _call(first, known, option), [_call(rule, _RULES, option) for rule in rules]
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):  # the last two if too deep
        raise UserError(
            f"'{option}' must be one of {', '.join(every_preset)}, or a function of yours such as "
            f"'my_stages:mine', plain or with numbers as in 'pbs_attn(0.95)' and 'mean_pooling(0.9) | Band(128)': "
            f"{text}"
        ) from None
    try:
        return extended(preset(), [rule() for rule in also])
    except (TypeError, ValueError) as error:
        raise UserError(f"'{option}' {text}: {error}") from None


def written(text: str) -> AnyPipeline:
    """The pipeline that `--preset` names, as `read` gives it.

    It selects at any length, also where a GPU would be faster without, unless it would keep everything.
    """
    return always_sparse(read(text, "--preset"))


def _call(text: ast.expr, known: Mapping[str, Callable[..., Any]], option: str) -> Callable[[], Any]:
    """`NAME`, or `NAME(...)` with plain values, of what is known."""
    name, arguments, keywords = (
        (text.func, text.args, text.keywords) if isinstance(text, ast.Call) else (text, [], [])
    )
    values = [ast.literal_eval(argument) for argument in arguments]
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    if len(named) < len(keywords):  # `ast.parse` takes it, and Python does not
        raise UserError(f"'{option}' must give each argument once: {ast.unparse(text)}")
    return partial(known[ast.unparse(name)], *values, **named)

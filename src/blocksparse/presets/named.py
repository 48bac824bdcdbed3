"""Presets by their names: in a plan, in an engine's configuration and on a command line.

preset_named    `preset_named` is the preset for text of a name.
extended        `extended` is a pipeline that keeps more, by position.
always_sparse   `always_sparse` is a pipeline that selects at any length.
written         `written` reads a pipeline as it is written in Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

from attrs import evolve

from blocksparse.check.validators import UserError, shown
from blocksparse.execute.auto import AutoExecutor
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.presets import every_preset
from blocksparse.select.positions import Band, LastQueries, Sink
from blocksparse.select.selector import PositionSelector

_RULES: dict[str, Callable[..., PositionSelector]] = {"Band": Band, "Sink": Sink, "LastQueries": LastQueries}


def preset_named(name: object) -> Callable[..., AnyPipeline]:
    """The preset for text of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in list(every_preset):  # a list, because JSON may hold what no dict can look up
        raise ValueError(f"there is no preset {shown(name)}; there are {', '.join(every_preset)}")
    return every_preset[str(name)]


def extended(pipeline: AnyPipeline, rules: Sequence[PositionSelector]) -> AnyPipeline:
    """The same pipeline, which also keeps what each of `rules` keeps: in one launch for all of them."""
    return pipeline | reduce(or_, rules) if rules else pipeline


def always_sparse(pipeline: AnyPipeline) -> AnyPipeline:
    """The same pipeline, which selects at any length, also where `AutoExecutor` would attend densely."""
    executor = pipeline.executor
    if not isinstance(executor, AutoExecutor):
        return pipeline
    return evolve(pipeline, executor=evolve(executor, dense_below=0))


def written(text: str) -> AnyPipeline:
    """The pipeline of a preset as it is written in Python: `pbs_attn`, or `pbs_attn(0.95, block=64) | Band(128)`.

    It selects at any length, also where a GPU would be faster without, unless it would keep everything.

    Raises:
        UserError: unknown preset, or arguments that it does not accept.
    """
    try:
        first: ast.expr = ast.parse(text.strip(), mode="eval").body
        rules: list[ast.expr] = []
        while isinstance(first, ast.BinOp) and isinstance(first.op, ast.BitOr):
            rules.insert(0, first.right)
            first = first.left
        preset, also = _call(first, every_preset), [_call(rule, _RULES) for rule in rules]
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):  # the last two if too deep
        raise UserError(
            f"'--preset' must be one of {', '.join(every_preset)}, plain or with numbers as in "
            f"'pbs_attn(0.95)' and 'mean_pooling(0.9) | Band(128)': {text}"
        ) from None
    try:
        return always_sparse(extended(preset(), [rule() for rule in also]))
    except (TypeError, ValueError) as error:
        raise UserError(f"'--preset' {text}: {error}") from None


def _call(text: ast.expr, known: Mapping[str, Callable[..., Any]]) -> Callable[[], Any]:
    """`NAME`, or `NAME(...)` with plain values, of what is known."""
    name, arguments, keywords = (
        (text.func, text.args, text.keywords) if isinstance(text, ast.Call) else (text, [], [])
    )
    values = [ast.literal_eval(argument) for argument in arguments]
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    if len(named) < len(keywords):  # `ast.parse` takes it, and Python does not
        raise UserError(f"'--preset' must give each argument once: {ast.unparse(text)}")
    return partial(known[ast.unparse(name)], *values, **named)

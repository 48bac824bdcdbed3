"""Methods that the user can name: any preset, with or without arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import evolve

from blocksparse.check.validators import UserError
from blocksparse.execute.auto import AutoExecutor
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace
from blocksparse.presets import every_preset
from blocksparse.select.positions import Band, Sink

_RULES: dict[str, Callable[..., Any]] = {"Band": Band, "Sink": Sink}


def method(written: str) -> AnyPipeline:
    """The pipeline of a preset as it is written in Python: `pbs_attn`, or `pbs_attn(0.95, block=64) | Band(128)`.

    It selects at any length, also where a GPU would be faster without, unless it would keep everything.

    Raises:
        UserError: unknown preset, or arguments that it does not accept.
    """
    try:
        first: ast.expr = ast.parse(written.strip(), mode="eval").body
        rules: list[ast.expr] = []
        while isinstance(first, ast.BinOp) and isinstance(first.op, ast.BitOr):
            rules.insert(0, first.right)
            first = first.left
        preset, also = _call(first, every_preset), [_call(rule, _RULES) for rule in rules]
    except (SyntaxError, ValueError, KeyError):
        raise UserError(
            f"'--preset' must be one of {', '.join(every_preset)}, plain or with numbers as in "
            f"'pbs_attn(0.95)' and 'mean_pooling(0.9) | Band(128)': {written}"
        ) from None
    try:
        pipeline: AnyPipeline = preset()
        for rule in also:
            pipeline = pipeline | rule()
    except (TypeError, ValueError) as error:
        raise UserError(f"'--preset' {written}: {error}") from None
    executor = pipeline.executor
    if isinstance(executor, AutoExecutor):
        pipeline = evolve(pipeline, executor=evolve(executor, dense_below=0))
    return pipeline


def _call(written: ast.expr, known: Mapping[str, Callable[..., Any]]) -> Callable[[], Any]:
    """`NAME`, or `NAME(...)` with plain values, of what is known."""
    name, arguments, keywords = (
        (written.func, written.args, written.keywords) if isinstance(written, ast.Call) else (written, [], [])
    )
    values = [ast.literal_eval(argument) for argument in arguments]
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    return partial(known[ast.unparse(name)], *values, **named)


def executor_of(pipeline: AnyPipeline, trace: AnyTrace) -> str:
    """The executor of `pipeline` that runs inputs like those of `trace`, and why faster ones cannot."""
    if trace.dense_because is not None:
        return f"dense attention runs: {trace.dense_because}"
    if isinstance(pipeline.executor, AutoExecutor):
        return str(pipeline.executor.choose(trace.q, trace.k, trace.v, trace.mask, trace.spec))
    return type(pipeline.executor).__name__

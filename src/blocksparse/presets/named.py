"""Presets by their names: in a plan, in an engine's configuration and on a command line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from importlib import import_module
from operator import or_
from typing import Any, final

from attrs import evolve, field, frozen

from blocksparse.check.stage import parts_of
from blocksparse.check.validators import UserError, a, count, is_real, optional, shown, size, whole
from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.triton import TritonExecutor
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.pipeline import Pipeline
from blocksparse.presets import every_preset
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.positions import Band, Everything, LastQueries, Sink
from blocksparse.select.selector import PositionSelector, ScoresT_contra, Selector, SelectorTraits
from blocksparse.select.vertical_slash import VerticalSlashTopK

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
            raise TypeError(
                f"{shown(name)} must return a Pipeline: {shown(pipeline)}. "
                "Return Pipeline(...) or what a preset gives."
            )
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
            f"'{option}' must be one of {', '.join(every_preset)}, or a function of yours: {text}. Write it as in "
            "'my_stages:mine', 'pbs_attn(0.95)' or 'mean_pooling(0.9) | Band(128)'."
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


class TuneError(UserError, ValueError):
    """A model cannot be tuned as asked, or a plan cannot be used; the message says why and what to do."""


@final
@frozen(repr=False, cache_hash=True)
class UpTo(Selector[ScoresT_contra, BlockMask]):
    """Keep what `rule` keeps in prompts of at most `tokens` keys, and every block in chunks of longer ones."""

    rule: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    tokens: int = field(converter=whole, validator=size)

    def __repr__(self) -> str:
        return f"UpTo({self.rule!r}, {self.tokens})"

    traits = SelectorTraits(reads_values=False)

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.rule(scores) if scores.grid.prompt_keys <= self.tokens else Everything().on(scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens < N or self.rule.keeps_everything(M, N, causal=causal)

    @property
    def prompt_tail(self) -> int | None:
        tail = super().prompt_tail
        return None if tail is None else max(tail, self.tokens)  # with that many more, every prompt is longer


def has_fixed_budget(selector: Selector[Any, Any]) -> bool:
    """Whether a selector keeps a fixed number of tokens or blocks, as windows do."""
    if isinstance(selector, PositionSelector | VerticalSlashTopK):
        return not isinstance(selector, Everything)
    if selectors := parts_of(selector, Selector):
        return all(map(has_fixed_budget, selectors))
    return getattr(selector, "k", None) is not None


def _plain(value: object) -> bool:
    """Whether JSON gives a value back as it was."""
    if isinstance(value, list):
        return all(map(is_real, value))
    return value is None or isinstance(value, bool | int | float | str)


@final
@frozen
class Candidate:
    """A preset with keyword arguments, and optionally a band and the last queries on top of its choice.

        Candidate("xattention", {"mass": 0.9, "block": 64}, band=128, last=128)

    Args:
        preset: a name in `blocksparse.presets.every_preset`.
        arguments: keyword arguments of the preset. Numbers, lists of numbers (one per query head), names, True,
            False and None.
        band: also keep blocks that hold a key at most so many tokens before a query. None adds no band. `s2o`
            takes its band among the arguments: `Candidate("s2o", {"tau": 0.1, "band": 64})`.
        last: also keep every block of the rows of the last so many queries. None adds no rows.
        pv_skip: `pv_skip` of `TritonExecutor`, which runs on a GPU only. None takes `AutoExecutor`.

    Raises:
        TuneError: the preset does not exist, or it does not take these arguments or this band.
    """

    preset: str = field()
    arguments: Mapping[str, Any] = field(factory=dict)
    band: int | None = None
    pv_skip: float | None = None
    last: int | None = None

    def __attrs_post_init__(self) -> None:
        self.pipeline()

    def __str__(self) -> str:
        """As Python, to paste: `xattention(mass=0.9, block=64) | Band(128) | LastQueries(128)`."""
        arguments = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if self.pv_skip is not None:
            arguments.append(f"executor=TritonExecutor(pv_skip={self.pv_skip!r})")
        band = "" if self.band is None else f" | Band({self.band})"
        last = "" if self.last is None else f" | LastQueries({self.last})"
        return f"{self.preset}({', '.join(arguments)}){band}{last}"

    @property
    def fixed_budget(self) -> bool:
        """Whether it keeps a fixed number of tokens, which may be too few in longer prompts."""
        return has_fixed_budget(self.pipeline().selector)

    def pipeline(self) -> AnyPipeline:
        """The pipeline itself; it selects at any length, also where dense attention would be faster."""
        try:
            preset = preset_named(self.preset)
        except ValueError as error:
            raise TuneError(str(error)) from None
        for name, value in self.arguments.items():
            if not _plain(value):
                raise TuneError(
                    f"argument '{name}' of {self.preset} must be a number, a list of numbers, a name, true, false "
                    f"or null: {shown(value)}. Edit the plan, or tune again."
                )
        try:
            optional(count).check(band=self.band, last=self.last)
            more = {} if self.pv_skip is None else {"executor": TritonExecutor(pv_skip=self.pv_skip)}
            rules: list[PositionSelector] = [] if self.band is None else [Band(self.band)]
            rules += [] if self.last is None else [LastQueries(self.last)]
            # A plan holds "dense" where dense attention is the better choice.
            return always_sparse(extended(preset(**self.arguments, **more), rules))
        except (TypeError, ValueError) as error:
            raise TuneError(f"the choice {self} cannot be made: {error}") from None

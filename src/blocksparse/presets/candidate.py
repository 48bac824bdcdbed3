"""`Candidate` names a pipeline readably: a preset, its arguments, and what is added to its choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from attrs import field, frozen

from blocksparse.check.stage import parts_of
from blocksparse.check.validators import UserError, a, count, is_real, optional, shown, size, whole
from blocksparse.execute.triton import TritonExecutor
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.presets.named import always_sparse, extended, preset_named
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.positions import Band, Everything, LastQueries
from blocksparse.select.selector import PositionSelector, ScoresT_contra, Selector, SelectorTraits
from blocksparse.select.vertical_slash import VerticalSlashTopK


class TuneError(UserError, ValueError):
    """A model cannot be tuned as asked, or a plan cannot be used; the message says why and what to do."""


@final
@frozen(repr=False, cache_hash=True)
class UpTo(Selector[ScoresT_contra, BlockMask]):
    """Keep what `rule` keeps in calls of at most `tokens` keys, and every block in longer calls."""

    rule: Selector[ScoresT_contra, BlockMask] = field(validator=a(Selector))
    tokens: int = field(converter=whole, validator=size)

    def __repr__(self) -> str:
        return f"UpTo({self.rule!r}, {self.tokens})"

    traits = SelectorTraits(reads_values=False)

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        return self.rule(scores) if scores.grid.k_len <= self.tokens else Everything().on(scores.grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens < N or self.rule.keeps_everything(M, N, causal=causal)


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
        arguments: keyword arguments of the preset: numbers, lists of numbers (one per query head), names, True,
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
                    f"argument '{name}' of {self.preset} must be a number, a list of numbers, a name, true, "
                    f"false or null: {shown(value)}"
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

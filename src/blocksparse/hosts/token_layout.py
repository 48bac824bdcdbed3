"""Where the tokens of a picture or a video lie in a sequence, and a pipeline of the user's for them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, final

import torch
from attrs import evolve, field, fields, frozen, has
from torch import Tensor

from blocksparse.check.validators import Rule, count, flag, is_whole, shown, whole
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.order.grid_orders import GivenOrder, GridOrder, RasterOrder, three_sizes
from blocksparse.order.permutation import Permuter
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.grid_rules import GridSelector
from blocksparse.select.positions import LastKeys, LastQueries
from blocksparse.select.selector import ScoresT_contra, Selector, SelectorTraits

Sizes = tuple[int, int, int]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of q, k, v `[B, H, N, D]` that gives the output `[B, H, N, Dv]`."""

_several_sizes = Rule(
    "a tuple of grids (T, H, W), each of three whole numbers",
    lambda x: isinstance(x, tuple) and all(map(three_sizes.is_kind, x)),
    lambda x: all(map(three_sizes.passes, x)),
)


@final
@frozen
class TokenLayout:
    """The tokens of one forward call: those of one or more pictures or videos, and those of text.

    Here text means every token that is always kept, as a query and as a key. Audio, given frames and earlier
    frames of a video count as text too.

    Args:
        grids: frames, rows and columns `(T, H, W)` in tokens, one per picture or video. Each is flattened frame by
            frame and row by row, and they stand in this order.
        text: tokens of text, padding included. 0 where text has a separate cross attention. Attention over the
            pictures alone may occur in the same model.
        before: how many tokens of text stand before the first picture; or a tuple, how many directly before each.
            The rest stand behind the last one.
        real: how many tokens of text are real, for each entry of the batch. Of the tokens of text, real ones come
            first, and all behind them are padding. None means without padding.
        together: whether ranks of context parallelism share out the sequence as one, and not the pictures and the
            text each.
    """

    grids: tuple[Sizes, ...] = field(validator=_several_sizes)
    text: int = field(default=0, converter=whole, validator=count)
    before: int | tuple[int, ...] = field(default=0)
    real: tuple[int, ...] | None = field(default=None)
    together: bool = field(default=False, validator=flag)

    @before.validator
    def _check_before(self, _: object, before: object) -> None:
        each = before if isinstance(before, tuple) else (before,)
        if not all(map(is_whole, each)):
            raise TypeError(
                f"'before' must be a whole number, or a tuple of one per picture: {shown(before)}. "
                "Write (0, 77), say."
            )
        fits = not isinstance(before, tuple) or len(before) == len(self.grids)
        if not fits or any(n < 0 for n in each) or sum(each) > self.text:
            raise ValueError(
                f"'before' must count at most 'text' ({self.text}) tokens, once or for each of {len(self.grids)} "
                f"pictures: {shown(before)}. Count text that stands before it."
            )

    @real.validator
    def _check_real(self, _: object, real: tuple[int, ...] | None) -> None:
        if real is not None and not all(0 <= n <= self.text for n in real):
            raise ValueError(
                f"'real' must name at most 'text' ({self.text}) tokens per entry: {shown(real)}. Count no padding."
            )

    @property
    def cells(self) -> int:
        """The number of tokens of all pictures."""
        return sum(map(prod, self.grids))

    @property
    def texts(self) -> frozenset[int]:
        """How many tokens of text one call of attention may have."""
        return frozenset({0, self.text, *(self.real or ())})

    def lengths(self, text: int) -> list[int]:
        """The lengths of text and pictures by turns, in a sequence with `text` tokens of text. Text ends it."""
        before = self.before if isinstance(self.before, tuple) else (self.before, *(0 for _ in self.grids[1:]))
        lengths = []
        for directly, grid in zip(before, self.grids, strict=True):
            lengths += [min(directly, text), prod(grid)]
            text -= lengths[-2]
        return [*lengths, text]

    def attend(self, attend: Callable[[int], Attend], q: Tensor, k: Tensor, v: Tensor, *, padded: bool) -> Tensor:
        """Call `attend(text)` on the pictures, followed by as many tokens of text, and put everything back.

        `q`, `k` and `v` are `[B, H, N, D]` in the model's order. Queries that are padding get zeros. `q` may lack
        tokens of text at the front.

        Args:
            attend: gives for a number of tokens of text the function that attends.
            padded: whether the model masks the padding of its text. If not, every token is real.
        """
        text = k.shape[2] - self.cells
        real = self.real if padded and self.real is not None else (text,) * q.shape[0]
        if len(set(real)) == 1:
            return self._alike(attend(real[0]), q, k, v, text, real[0])
        one_by_one = [
            self._alike(attend(n), q[i : i + 1], k[i : i + 1], v[i : i + 1], text, n) for i, n in enumerate(real)
        ]
        return torch.cat(one_by_one)

    def _alike(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, text: int, real: int) -> Tensor:
        """The layout of the entries of a batch that have as many real tokens of text."""
        lacking = k.shape[2] - q.shape[2]
        if lacking:  # rows are added, so that queries and keys stand in the same order and blocks
            q = torch.cat((q.new_zeros((*q.shape[:2], lacking, q.shape[3])), q), dim=2)
        out = attend(*(self._pictures_first(x, text)[:, :, : self.cells + real] for x in (q, k, v)))
        if text > real:
            out = torch.cat((out, out.new_zeros((*out.shape[:2], text - real, out.shape[3]))), dim=2)
        return self._in_order(out, text)[:, :, lacking:]

    def _pictures_first(self, x: Tensor, text: int) -> Tensor:
        """`x` `[B, H, N, D]` in the model's order, with all text behind the pictures."""
        lengths = self.lengths(text)
        if not any(lengths[:-1:2]):
            return x
        parts = x.split(lengths, dim=2)
        return torch.cat((*parts[1::2], *parts[::2]), dim=2)

    def _in_order(self, x: Tensor, text: int) -> Tensor:
        """The inverse of `_pictures_first`."""
        lengths = self.lengths(text)
        if not any(lengths[:-1:2]):
            return x
        pictures = x[:, :, : self.cells].split(lengths[1::2], dim=2)
        *texts, last = x[:, :, self.cells :].split(lengths[::2], dim=2)
        by_turns = [part for both in zip(texts, pictures, strict=True) for part in both]
        return torch.cat((*by_turns, last), dim=2)

    def gathered(self, x: Tensor, ranks: int) -> Tensor:
        """`x` `[B, H, N, D]` in the model's order, from the order in which Ulysses gathers the parts of ranks.

        Each rank holds a part of the text and one of the pictures, in the model's order, or a part of the whole.
        """
        text = x.shape[2] - self.cells
        if not text or self.together:
            return x
        parts = x.unflatten(2, (ranks, -1))
        here = text // ranks
        first = here if self.before else parts.shape[3] - here
        return torch.cat((parts[:, :, :, :first].flatten(2, 3), parts[:, :, :, first:].flatten(2, 3)), dim=2)

    def scattered(self, x: Tensor, ranks: int) -> Tensor:
        """The inverse of `gathered`."""
        text = x.shape[2] - self.cells
        if not text or self.together:
            return x
        first = text if self.before else x.shape[2] - text
        parts = (x[:, :, :first].unflatten(2, (ranks, -1)), x[:, :, first:].unflatten(2, (ranks, -1)))
        return torch.cat(parts, dim=3).flatten(2, 3)


def placed(attention: LayerPipeline, grids: tuple[Sizes, ...], text: int, device: torch.device) -> LayerPipeline:
    """`attention` for sequences of pictures on these grids, followed by `text` tokens of text.

    Blocks that hold text are kept, as keys of all queries and with all keys for their own queries. An order of
    cells is computed here, once for all layers and steps.
    """
    if isinstance(attention, HeadGroups):
        groups = attention.groups.items()
        return HeadGroups({heads: p and placed(p, grids, text, device) for heads, p in groups})  # type: ignore[misc]
    permuter = _on_grids(attention.permuter, grids, text, device)
    selector = _selecting_on(attention.selector, grids)
    selector = WithText(selector, text) if text else selector
    try:
        return evolve(attention, permuter=permuter, selector=selector)
    except TypeError as error:
        raise TypeError(
            "blocks that hold text are added to what a pipeline selects, and this one then does not fit together: "
            f"{str(error).removesuffix('.')}. Use an executor that does not stop early."
        ) from None


def check_orders(attention: LayerPipeline) -> None:
    """Refuse orders that place text by themselves."""
    pipelines = attention.groups.values() if isinstance(attention, HeadGroups) else (attention,)
    for pipeline in pipelines:
        order = pipeline and pipeline.permuter
        if isinstance(order, GridOrder) and (order.prefix or order.suffix):
            raise ValueError(
                f"the model says where its text stands, so leave out 'prefix' and 'suffix': {order!r}. "
                f"{type(order).__name__}() takes the grid from the model too"
            )


def _on_grids(order: Permuter[Any], grids: tuple[Sizes, ...], text: int, device: torch.device) -> Permuter[Any]:
    if not isinstance(order, GridOrder):
        return order
    if order.grid is not None and (order.grid,) != grids:
        raise ValueError(
            f"{type(order).__name__} was made for the grid {order.grid}, and the tokens of this call have "
            f"{' and '.join(map(str, grids))}. Leave the grid out, and it is taken from the model."
        )
    parts = [evolve(order, grid=grid).cells(device) for grid in grids]
    line = (1, 1, sum(map(prod, grids)))
    if all(cells is None for cells in parts):
        return RasterOrder(line, suffix=text)
    before, in_turn = 0, []
    for grid, cells in zip(grids, parts, strict=True):
        in_turn.append(before + (torch.arange(prod(grid), device=device) if cells is None else cells))
        before += prod(grid)
    return GivenOrder(line, torch.cat(in_turn), suffix=text)


def _selecting_on(selector: Selector[Any, Any], grids: tuple[Sizes, ...]) -> Selector[Any, Any]:
    """The selector, in which every rule on the cells of a video has the grid."""
    if not isinstance(selector, GridSelector):
        stage: Any = selector
        names = [each.name for each in fields(type(stage))] if has(type(stage)) else []
        parts = {name: part for name in names if isinstance(part := getattr(selector, name), Selector)}
        on_grids = {name: _selecting_on(part, grids) for name, part in parts.items()}
        changed: dict[str, Any] = {name: part for name, part in on_grids.items() if part is not parts[name]}
        return evolve(stage, **changed) if changed else selector
    if len(grids) > 1:
        name = type(selector).__name__
        raise ValueError(
            f"{name} is a rule on one video, and the tokens of this call are {len(grids)} pictures. Leave it out."
        )
    if selector.prefix or selector.grid not in (None, *grids):
        raise ValueError(
            f"{selector!r} was made for other tokens than those of this call, {grids[0]}. Leave 'grid' and "
            "'prefix' out, and they are taken from the model."
        )
    return evolve(selector, grid=grids[0])


@final
@frozen(eq=False)
class WithText(Selector[ScoresT_contra, BlockMask]):
    """The blocks of `inner`, and every block, however fine, that holds one of the last `text` queries or keys."""

    inner: Selector[ScoresT_contra, BlockMask]
    text: int

    traits = SelectorTraits(reads_values=False)

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        mask = self.inner(scores)
        return (LastQueries(self.text) | LastKeys(self.text)).joined(mask, mask.grid)

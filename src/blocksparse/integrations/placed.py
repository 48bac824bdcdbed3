"""A pipeline of the user's, for the tokens of one layout: its order gets the grid, and text is always kept."""

from __future__ import annotations

from math import prod
from typing import Any, final

import torch
from attrs import evolve, fields, frozen, has

from blocksparse.check.per_head import PerHead
from blocksparse.integrations.token_layout import Sizes
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.order.grid_orders import GivenOrder, GridOrder, RasterOrder
from blocksparse.order.permutation import Permuter
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.grid_rules import GridSelector
from blocksparse.select.positions import LastKeys, LastQueries
from blocksparse.select.selector import ScoresT_contra, Selector


def placed(attention: LayerPipeline, grids: tuple[Sizes, ...], text: int, device: torch.device) -> LayerPipeline:
    """`attention` for sequences of pictures on these grids, followed by `text` tokens of text.

    Blocks that hold text are kept, as keys of all queries and with all keys for their own queries. An order of
    cells is computed here, once for all layers and steps.

    Raises:
        TypeError: a pipeline stops early, which it cannot if blocks are added to its choice.
        ValueError: an order, or a rule on cells, was made for another grid, or places text by itself.
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
            f"{error}; use an executor that does not stop early"
        ) from None


def check_orders(attention: LayerPipeline) -> None:
    """Refuse orders that place text by themselves.

    Raises:
        ValueError: an order has a prefix or a suffix.
    """
    pipelines = attention.groups.values() if isinstance(attention, HeadGroups) else (attention,)
    for pipeline in pipelines:
        order = pipeline and pipeline.permuter
        if isinstance(order, GridOrder) and (order.prefix or order.suffix):
            raise ValueError(
                f"the model says where its text stands, so leave out 'prefix' and 'suffix': {order!r}; "
                f"{type(order).__name__}() takes the grid from the model too"
            )


def _on_grids(order: Permuter[Any], grids: tuple[Sizes, ...], text: int, device: torch.device) -> Permuter[Any]:
    if not isinstance(order, GridOrder):
        return order
    if order.grid is not None and (order.grid,) != grids:
        raise ValueError(
            f"{type(order).__name__} was made for the grid {order.grid}, and the tokens of this call have "
            f"{' and '.join(map(str, grids))}: leave the grid out, and it is taken from the model"
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
        raise ValueError(f"{name} is a rule on one video, and the tokens of this call are {len(grids)} pictures")
    if selector.prefix or selector.grid not in (None, *grids):
        raise ValueError(
            f"{selector!r} was made for other tokens than those of this call, {grids[0]}: leave 'grid' and "
            "'prefix' out, and they are taken from the model"
        )
    return evolve(selector, grid=grids[0])


@final
@frozen(eq=False)
class WithText(Selector[ScoresT_contra, BlockMask]):
    """What `inner` keeps, and every block, however fine, that holds one of the last `text` queries or keys."""

    inner: Selector[ScoresT_contra, BlockMask]
    text: int

    def __call__(self, scores: ScoresT_contra) -> BlockMask:
        mask = self.inner(scores)
        return (LastQueries(self.text) | LastKeys(self.text)).joined(mask, mask.grid)

    def reads_beyond(self, tau: PerHead) -> bool:
        return self.inner.reads_beyond(tau)

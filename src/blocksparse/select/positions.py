"""Rules of position: blocks that are kept for their position, whatever their scores.

PositionSelector   Role: selectors that look at positions alone, and their union.
Everything         Keep every reachable block, which gives dense attention.
Sink               Keep the start of the prompt (BFLA, eq. 16; the attention sink).
Band               Keep the keys near the query (BFLA, eq. 15).
Stride             Keep every eta-th block of a row (BFLA, eq. 18).
LastKeys           Keep the end of the sequence for all queries (text behind a picture).
LastQueries        Keep everything for the last queries (tri-shape of MInference's released code).
block_indices      The indices of rows and columns by which random rules draw numbers for blocks.
Random             Keep a random share of the blocks (BFLA, eq. 19).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final, overload

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.class_line import by_position, of_parts
from blocksparse.check.per_head import PerHead, over_blocks, per_head, probability
from blocksparse.check.validators import a, count, flag, hash_seed, size, whole
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.grid import NOWHERE, Places, last_from
from blocksparse.kernels.masks.reach import counter_hash as counter_hash
from blocksparse.kernels.masks.reach import every, within_reach
from blocksparse.score.scorer import BlockScores
from blocksparse.select.block_mask import BlockMask
from blocksparse.select.selector import ScoresT, Selector, Union


class PositionSelector(Selector[BlockScores, BlockMask]):
    """Keeps blocks by position, whatever their scores. `OnTiles` applies one to finer blocks.

    `a | b` of two position selectors is a position selector and needs one launch. A custom rule defines `where`
    only, because unions call nothing else.

    Raises:
        TypeError: a subclass defines `__call__`, `on`, `joined` or `added_to`.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if own := {"__call__", "on", "joined", "added_to"} & set(vars(cls)):
            raise TypeError(
                f"{cls.__name__} has its own {', '.join(sorted(own))}, which unions would not call: a "
                "PositionSelector defines only 'where'; make it a Selector"
            )

    @abstractmethod
    def where(self, grid: Grid) -> Tensor:
        """Blocks to keep, bool, broadcastable to `[B, Hq, rows, cols]`; callers apply diagonal and causality."""

    def reads_beyond(self, tau: PerHead) -> bool:
        return False

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        """The rule as places that a kernel computes itself, and rules of which it gets `where`."""
        return NOWHERE, (self,)

    @overload
    def __or__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __or__(self, other: Selector[ScoresT, BlockMask]) -> Selector[ScoresT, BlockMask]: ...
    def __or__(self, other: Any) -> Any:
        """Keep what either keeps. A choice by scores goes first, so that the rule can join its mask."""
        if isinstance(other, PositionSelector):
            return PositionUnion(self, other)
        return Union(other, self) if isinstance(other, Selector) else NotImplemented

    @overload
    def __ror__(self, other: PositionSelector) -> PositionSelector: ...
    @overload
    def __ror__(self, other: Selector[ScoresT, BlockMask]) -> Selector[ScoresT, BlockMask]: ...
    def __ror__(self, other: Any) -> Any:
        return PositionUnion(other, self) if isinstance(other, PositionSelector) else super().__ror__(other)

    def __call__(self, scores: BlockScores) -> BlockMask:
        return self.on(scores.grid)

    def added_to(self, first: Selector[BlockScores, BlockMask], scores: BlockScores) -> BlockMask:
        places, others = self.parts()
        mask = None if others else first.with_places(scores, places)
        return self.joined(first(scores), scores.grid) if mask is None else mask

    def on(self, grid: Grid) -> BlockMask:
        """The mask on `grid`: `where`, and the diagonal, as far as they are reachable."""
        keep = self._within_reach(None, grid)
        return BlockMask(keep.expand(grid.batch, grid.q_heads, grid.rows, grid.cols), grid)

    def joined(self, mask: BlockMask, grid: Grid) -> BlockMask:
        """Union of `mask`, which lies on the blocks of `grid`, and the blocks of the rule, in one launch.

        Where query heads share `mask`, they share what the rule keeps for any of them.
        """
        shared = mask.keep.shape[1] != grid.q_heads
        if not mask.grid.same_blocks(grid) or (shared and (self.parts()[1] or grid.shared() is not grid)):
            # The rule may keep other blocks in another head of a group.
            mine = self.on(grid)
            return mask | (mine.share_heads() if shared else mine)
        return BlockMask(self._within_reach(mask.keep, mask.grid).expand(mask.keep.shape), mask.grid)

    def _within_reach(self, keep: Tensor | None, grid: Grid) -> Tensor:
        """`[B|1, H|1, rows, cols]`; one entry serves all batch entries, or heads, that do not differ."""
        places, others = self.parts()
        for rule in others:
            more = rule.where(grid)
            keep = more if keep is None else keep | more
        return within_reach(keep, grid, places=places, diagonal=True)


@final
@frozen(repr=False, cache_hash=True)
class PositionUnion(PositionSelector):
    """Keep what either rule of position keeps; written `a | b`."""

    first: PositionSelector = field(validator=a(PositionSelector))
    second: PositionSelector = field(validator=a(PositionSelector))

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"

    def where(self, grid: Grid) -> Tensor:
        return self.first.where(grid) | self.second.where(grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        if any(part.keeps_everything(M, N, causal=causal) for part in (self.first, self.second)):
            return True
        places, _ = self.parts()
        # The last query is `N - 1 - first` tokens away from the first key that is not among the `first` ones.
        return causal and places.near is not None and (places.first or 0) + places.near >= N - 1

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        (mine, rest), (its, others) = self.first.parts(), self.second.parts()
        both = mine.joined(its)
        return (mine, (*rest, self.second)) if both is None else (both, (*rest, *others))

    def alignment(self, causal: bool) -> int:
        return of_parts(causal, self.first, self.second)


@final
@frozen(cache_hash=True)
class Everything(PositionSelector):
    """Keep every reachable block, whatever its score. The result is dense attention."""

    def where(self, grid: Grid) -> Tensor:
        return grid.reachable

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return True

    def alignment(self, causal: bool) -> int:
        return 1


@final
@frozen(cache_hash=True)
class Sink(PositionSelector):
    """Keep every block that holds one of the first `tokens` original positions (BFLA, eq. 16)."""

    tokens: int = field(default=1, converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.holding_first(self.tokens)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(first=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return 1


@final
@frozen(cache_hash=True)
class Band(PositionSelector):
    """Keep every block that may hold a key at most `tokens` away from some query of the row (BFLA, eq. 15).

    Distances are between original positions, to keys before the query when causal, to keys on both sides
    otherwise. To keep `w` whole blocks before the row's own, use `Band(w * block)`.
    """

    tokens: int = field(converter=whole, validator=count)

    def where(self, grid: Grid) -> Tensor:
        return grid.within(self.tokens)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= (N if causal else max(M, N)) - 1  # the greatest distance

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(near=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return by_position(self, causal)


BITS = 32


def block_indices(grid: Grid, *, of_chunk: bool = False) -> tuple[Tensor, Tensor]:
    """The index of every row, `[rows, 1]`, and of every column, `[cols]`, int64.

    Rows are counted in the whole prompt, so that a block has the same index however the prompt is chunked. With
    `of_chunk` they are counted from the start of the chunk.
    """
    device = grid.q_position.device
    skipped = 0 if of_chunk else grid.first_row
    rows = torch.arange(skipped, skipped + grid.rows, device=device)
    return rows.unsqueeze(1), torch.arange(grid.cols, device=device)


@final
@frozen(cache_hash=True)
class Stride(PositionSelector):
    """Keep one block of every `eta` consecutive ones in a row, for all heads alike (BFLA, eq. 18).

    The kept blocks of a row start at a random offset of the row. So each column, too, is kept in one of `eta` rows
    on average, without a regular pattern. The draw is by the row's index in the whole prompt. The paper applies
    the rule only to blocks that another rule dropped; `a | Stride(eta)` keeps the same set.

    Args:
        eta: distance between the kept blocks of a row.
        seed: seed of the offsets, in [0, 2^32).
        released: use the linear rule of the authors' code: `131 i + 17 j + seed` must be a multiple of `eta`. Rows
            are counted from the start of the chunk. If `eta` is a multiple of 17, most rows keep nothing, and the
            others keep one block of every `eta / 17`.
    """

    eta: int = field(converter=whole, validator=size)
    seed: int = field(default=0, converter=whole, validator=hash_seed)
    released: bool = field(default=False, validator=flag, kw_only=True)

    def where(self, grid: Grid) -> Tensor:
        if not self.released:
            return every(self.eta, self.seed, grid)
        eta, (i, j) = min(self.eta, FAR), block_indices(grid, of_chunk=True)
        # Both terms are reduced modulo eta before they are broadcast against each other, so that the only
        # operation over all blocks is one comparison.
        return (17 * j % eta == -(131 * i + self.seed) % eta)[None, None]

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.eta == 1 and not self.released

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return super().parts() if self.released else (Places(stride=(self.eta, self.seed)), ())

    def alignment(self, causal: bool) -> int:
        if self.released:
            raise ValueError("'Stride' with 'released' counts rows from the start of the part")
        return by_position(self, causal)


@final
@frozen(cache_hash=True)
class LastKeys(PositionSelector):
    """Keep every block that holds one of the last `tokens` keys of the prompt, for every query that may see it.

    With text behind a picture, `LastKeys(text) | LastQueries(text)` lets the picture see all text, and the text
    everything. Where text stands in front, `Sink(text)` does the first.
    """

    tokens: int = field(converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.k_last >= min(grid.prompt_keys - min(self.tokens, grid.prompt_keys), FAR)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    @property
    def prompt_tail(self) -> int:
        return self.tokens

    def alignment(self, causal: bool) -> int:
        return 1


@final
@frozen(cache_hash=True)
class LastQueries(PositionSelector):
    """Keep every block of the rows that hold one of the last `tokens` queries of the prompt.

    A call ends its prompt unless `remaining` tokens follow: `pipeline(q, k, v, remaining=tokens)`.
    """

    tokens: int = field(converter=whole, validator=size)

    def where(self, grid: Grid) -> Tensor:
        return grid.q_last >= last_from(self.tokens, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= M

    @property
    def prompt_tail(self) -> int:
        return self.tokens

    def parts(self) -> tuple[Places, tuple[PositionSelector, ...]]:
        return Places(last=self.tokens), ()

    def alignment(self, causal: bool) -> int:
        return 1


_WORKSPACE = 2**24  # draws that are held at a time


@final
@frozen(cache_hash=True)
class Random(PositionSelector):
    """Keep each block with probability `rho`, independently of every other one (BFLA, eq. 19).

    A draw depends only on the seed, the KV head and the block's indices in the whole prompt. So the same blocks
    are kept in every call, on every device, in every batch entry and however the prompt is chunked. The query
    heads of a KV head have the same draws, so that a mask which they share (`SharedByGroup`) keeps a share of
    `rho` too.
    The paper applies the rule only to blocks that another rule dropped; `a | Random(rho)` keeps the same set.

    Args:
        rho: probability in [0, 1]; a number, or one per query head. A larger one keeps the same blocks and more.
        seed: seed of the draws, in [0, 2^32).
        released: use the linear rule of the authors' code, with rows counted from the start of the chunk. It keeps
            runs of neighbouring blocks, and nearby seeds keep mostly the same blocks.
    """

    rho: PerHead = field(converter=per_head, validator=probability)
    seed: int = field(default=0, converter=whole, validator=hash_seed)
    released: bool = field(default=False, validator=flag, kw_only=True)

    def where(self, grid: Grid) -> Tensor:
        i, j = block_indices(grid, of_chunk=self.released)
        head = torch.arange(grid.kv_heads, device=j.device).view(-1, 1, 1)
        heads = i.new_zeros(()).expand(1, grid.q_heads, 1, 1)
        rho = over_blocks(self.rho, heads).expand_as(heads)[0].unflatten(0, (grid.kv_heads, -1))  # [Hkv, G, 1, 1]
        rows = max(1, _WORKSPACE // (grid.kv_heads * grid.cols))
        keep = [self._kept(head, part, j, rho) for part in i.split(rows)]
        return torch.cat(keep, dim=2).flatten(0, 1).unsqueeze(0)  # [1, Hq, rows, cols]

    def _kept(self, head: Tensor, i: Tensor, j: Tensor, rho: Tensor) -> Tensor:
        """Mask of the kept blocks, `[Hkv, G, rows, cols]` bool. Integers are compared, so all devices agree."""
        if self.released:
            linear = 1103515245 * (i + 1) + 12345 * (j + 1) + 2654435761 * (head + 1) + self.seed
            psi, bound = (linear & 0x7FFFFFFF) % 1_000_000, (rho * 1_000_000).floor()
        else:
            psi, bound = counter_hash(self.seed, head, i, j), (rho * 2**BITS).ceil()
        return psi.unsqueeze(1) < bound.long()

    def alignment(self, causal: bool) -> int:
        return by_position(self, causal)

"""Rules of position: blocks that are kept for their position, whatever their scores."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.per_head import PerHead, over_blocks, per_head, probability
from blocksparse.check.stage import by_position
from blocksparse.check.validators import count, flag, hash_seed, size, whole
from blocksparse.grid import Grid
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.masks.grid import AlwaysKept, last_from
from blocksparse.kernels.masks.visibility import counter_hash as counter_hash
from blocksparse.kernels.masks.visibility import every
from blocksparse.select.selector import PositionSelector


@final
@frozen(cache_hash=True)
class Everything(PositionSelector):
    """Keep every visible block, whatever its score. The result is dense attention."""

    by_row = True

    def where(self, grid: Grid) -> Tensor:
        return grid.visible

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return True


@final
@frozen(cache_hash=True)
class Sink(PositionSelector):
    """Keep every block that holds one of the first `tokens` original positions (BFLA, eq. 16)."""

    tokens: int = field(default=1, converter=whole, validator=size)

    by_row = True

    def where(self, grid: Grid) -> Tensor:
        return grid.holding_first(self.tokens)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        return AlwaysKept(first=self.tokens), ()


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

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        return AlwaysKept(near=self.tokens), ()

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
        seed: seed of the offsets. From 0 to 2^32 - 1.
        released: the linear rule of the authors' code. `131 i + 17 j + seed` must be a multiple of `eta`. Rows are
            counted from the start of the chunk. If `eta` is a multiple of 17, most rows keep nothing, and the
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

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        return super().parts() if self.released else (AlwaysKept(stride=(self.eta, self.seed)), ())

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

    by_row = True

    def where(self, grid: Grid) -> Tensor:
        return grid.k_last >= min(grid.prompt_keys - min(self.tokens, grid.prompt_keys), FAR)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= N

    @property
    def prompt_tail(self) -> int:
        return self.tokens


@final
@frozen(cache_hash=True)
class LastQueries(PositionSelector):
    """Keep every block of the rows that hold one of the last `tokens` queries of the prompt.

    A call ends its prompt unless `remaining` tokens follow: `pipeline(q, k, v, remaining=tokens)`. Source:
    MInference's released code.
    """

    tokens: int = field(converter=whole, validator=size)

    by_row = True

    def where(self, grid: Grid) -> Tensor:
        return grid.q_last >= last_from(self.tokens, grid)

    def keeps_everything(self, M: int, N: int, *, causal: bool) -> bool:
        return self.tokens >= M

    @property
    def prompt_tail(self) -> int:
        return self.tokens

    def parts(self) -> tuple[AlwaysKept, tuple[PositionSelector, ...]]:
        return AlwaysKept(last=self.tokens), ()


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
        rho: probability in [0, 1]. A number, or one per query head. A larger one keeps the same blocks and more.
        seed: seed of the draws. From 0 to 2^32 - 1.
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

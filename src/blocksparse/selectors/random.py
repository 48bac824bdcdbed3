"""Keep a random share of the blocks (BFLA, eq. 19)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.alignment import by_position
from blocksparse.checks.per_head import PerHead, over_blocks, per_head, probability
from blocksparse.checks.validators import flag, hash_seed, whole
from blocksparse.geometry import Grid
from blocksparse.selectors import counter_hash
from blocksparse.selectors.counter_hash import BITS, block_indices
from blocksparse.selectors.position_selector import PositionSelector

_WORKSPACE = 2**24  # draws that are held at a time


@final
@frozen(cache_hash=True)
class Random(PositionSelector):
    """Keep each block with probability `rho`, independently of every other one (BFLA, eq. 19).

    A draw depends only on the seed, the KV head and the block's indices in the whole prompt, so the same blocks
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
            psi, bound = counter_hash.counter_hash(self.seed, head, i, j), (rho * 2**BITS).ceil()
        return psi.unsqueeze(1) < bound.long()

    def alignment(self, causal: bool) -> int:
        return by_position(self, causal)

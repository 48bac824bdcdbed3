"""Flattened groups of queries against flattened groups of keys, the best pair of a block (BFLA, section 3.2)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen, validators
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.scorers import pooling
from blocksparse.scorers.block_scores import BlockMass
from blocksparse.scorers.grid import Grid
from blocksparse.scorers.scorer import Scorer

_WORKSPACE = 2**25  # group products at a time


@final
@frozen(eq=False)
class FlattenMaxPoolScorer(Scorer[GlobalPermutation, BlockMass]):
    """Softmax over key blocks of the best product of two token groups (BFLA, eq. 3 to 9).

    A group is `g` consecutive slots. The product of two groups is `q[t] . k[t]` summed over their places `t`: one
    diagonal of their `g x g` logits. A block is worth its best pair of groups. A pair takes part if some query
    of the row of blocks may see some key of the group, and the two share a place: short groups are
    compared over the tokens that are there.

    The paper does not divide the sum by `g`. Its spread grows with `g`, so that the softmax over blocks is close
    to one-hot, and a threshold on its mass hardly acts. `per_token` tames it.

    Args:
        block: slots per block, on both sides unless `k_block` is given.
        g: slots per group; divides the blocks.
        k_block: slots per key block.
        per_token: divide each product by the places the pair shares, which makes it a mean logit.
        padded_tail: let groups without a token take part, as zeros, as the released code does. They score 0, which
            wins wherever all real pairs are below 0.
    """

    block: int = field(default=256, validator=pooling.size)
    g: int = field(default=64, validator=pooling.size)
    k_block: int | None = field(default=None, validator=validators.optional(pooling.size), kw_only=True)
    per_token: bool = field(default=False, kw_only=True)
    padded_tail: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        for name, size in (("block", self.block), ("k_block", self.k_block or self.block)):
            if size % self.g:
                raise ValueError(f"'{name}' must be a multiple of 'g' ({self.g}): {size}")

    def __call__(
        self, q: Tensor, k: Tensor, permutation: GlobalPermutation, *, causal: bool, scale: float
    ) -> BlockMass:
        k_block = self.k_block or self.block
        grid = Grid.of(q, k, permutation, q_block=self.block, k_block=k_block, causal=causal)
        seen = Grid.of(q, k, permutation, q_block=self.block, k_block=self.g, causal=causal).reachable
        queries = self._flatten(permutation.gather_queries(q), grid.q_lead, grid.rows * self.block)
        keys = self._flatten(permutation.gather_keys(k), 0, seen.shape[-1] * self.g)

        wide, high = k_block // self.g, self.block // self.g
        left_out = 0.0 if self.padded_tail else float("-inf")
        rows = max(1, _WORKSPACE // (q.shape[0] * q.shape[1] * high * keys.shape[2]))
        best = []
        for first in range(0, grid.rows, rows):
            product = pooling.products(queries[:, :, first * high : (first + rows) * high], keys)
            places = self._shared_places(grid, first * self.block, product.shape[2])
            if self.per_token:
                product = product / (self.g if self.padded_tail else places.clamp_min(1))
            takes_part = seen[:, :, first : first + rows].repeat_interleave(high, dim=2) & (places > 0)
            product = product.masked_fill(~takes_part, left_out)  # [B, Hq, rows * high, groups of keys]
            product = pad(
                product.unflatten(2, (-1, high)).amax(3), (0, grid.cols * wide - keys.shape[2]), value=left_out
            )
            best.append(product.unflatten(3, (-1, wide)).amax(4))
        logits = torch.cat(best, dim=2) * scale
        mass = pooling.softmax_over(grid.reachable & (logits != float("-inf")), logits)
        return BlockMass(mass, grid)  # [B, Hq, rows, cols]

    def _flatten(self, x: Tensor, lead: int, places: int) -> Tensor:
        """Groups as vectors, zero where there is no token, `[B, H, N, D] -> [B, H, places / g, g D]`."""
        padded = pad(x, (0, 0, lead, places - lead - x.shape[2]))
        return rearrange(padded, "B H (groups g) D -> B H groups (g D)", g=self.g)

    def _shared_places(self, grid: Grid, start: int, groups: int) -> Tensor:
        """Places where a query group, from slot `start` on, and a key group both hold a token; none is <= 0."""
        device = grid.q_position.device
        first = torch.arange(start, start + groups * self.g, self.g, device=device).unsqueeze(1)
        empty_before = (grid.q_lead - first).clamp_min(0)
        q_end = (grid.q_lead + grid.q_len - first).clamp_max(self.g)
        k_end = (grid.k_len - torch.arange(0, grid.k_len, self.g, device=device)).clamp_max(self.g)
        places: Tensor = torch.minimum(q_end, k_end) - empty_before
        return places  # [groups, groups of keys]

"""Rows of blocks and the keys in their lists, gathered for attention in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blocksparse.kernels.common.memory import empty_as
from blocksparse.kernels.common.sizes import FAR
from blocksparse.kernels.moving.gather_rows import gather_rows
from blocksparse.kernels.moving.gathered_keys import GatheredKeys
from blocksparse.kernels.multiplying.attention_with_lse import attention_with_lse
from blocksparse.kernels.multiplying.products import wide_dtype
from blocksparse.kernels.positions.token_positions import TokenPositions

_WORKSPACE = 2**19  # numbers that are gathered at a time, so that they stay in the caches
_TOGETHER = 256  # queries of neighbouring rows that attend together


class GatheredRows:
    """The rows of all heads one behind another, R in all, and what each has attended to so far."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        positions: TokenPositions,
        *,
        q_block: int,
        k_block: int,
        scale: float,
    ) -> None:
        """Take what `gather_attention` gets; `index` `[B, Hq, rows, cols]` lists the blocks of each row."""
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        maps_b, maps_h, maps = positions.k_position.shape[:3]
        self.q, self.scale, self.causal = q, scale, positions.causal
        b, h, row = (
            x.flatten()
            for x in torch.meshgrid(
                *(torch.arange(n, device=q.device) for n in (B, Hq, index.shape[2])), indexing="ij"
            )
        )
        self.head = h
        self.columns = index.flatten(0, 2)  # [R, cols] in visiting order
        # The key in every slot of the blocks of all maps, [maps * cols, k_block], -1 where empty; for each row its
        # first block there, and the first key of its head in `k` and `v`.
        self.k_at = positions.k_position.unflatten(-1, (-1, k_block)).flatten(0, 3)
        group = 0 * row if positions.group_of_row is None else positions.group_of_row[row]
        cols = positions.k_position.shape[-1] // k_block
        self.first_block = ((b % maps_b * maps_h + h * maps_h // Hq) * maps + group) * cols
        self.first_key = (b * Hkv + h * Hkv // Hq) * N
        self.keys = GatheredKeys(k, v, wide_dtype(q))

        q_at = positions.q_position.expand(B, Hq, -1).reshape(-1, q_block)
        self.live = q_at >= 0  # [R, q_block]
        # An empty place reads query 0, and sees every key.
        self.q_at = q_at.where(self.live, FAR)
        self.first = self.q_at.amin(1)
        query = (q_at - (N - M if self.causal else 0)).clamp_min(0)
        numbered = query + ((b * Hq + h) * M).unsqueeze(1)
        self.places = numbered[self.live], self.live.flatten().nonzero().squeeze(1)  # which query stands where
        queries = gather_rows(q, query.view(B, Hq, -1)).to(wide_dtype(q))
        self.queries = queries.view(-1, q_block, q.shape[-1])  # [R, q_block, D]
        self.out = queries.new_zeros(*q_at.shape, v.shape[-1])
        self.lse = queries.new_full(q_at.shape, float("-inf"))

    def teams(self, at: Tensor, places: Tensor) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
        """Rows that can attend together, some at a time, because neighbours read the same keys.

        Args:
            at: rows, rising, `[n]`.
            places: where the blocks that each is about to visit are in its list, `[n, sets, blocks]`.

        Yields:
            Which of these rows, and the other arguments of `attend`.
        """
        blocks, first_key = self._blocks(at, places).flatten(1), self.first_key[at, None]
        slots = self.k_at.index_select(0, blocks.flatten()).view(len(at), -1)
        hides = (slots < 0) | (slots > self.first[at, None]) if self.causal else slots < 0
        read = torch.cat((blocks, first_key), 1)
        begins = (read != read.roll(1, 0)).any(1)
        begins[0] = True
        number = torch.arange(len(at), device=at.device)
        first = number.where(begins, 0).cummax(0).values  # of its run, for each row
        begins |= (number - first) % max(1, _TOGETHER // self.queries.shape[1]) == 0
        size = torch.diff(begins.nonzero().squeeze(1), append=number.new_tensor([len(at)]))
        team = begins.cumsum(0) - 1
        # A mask may change bits where it hides nothing, so no team has one because of others.
        masked = torch.zeros_like(size).index_add_(0, team, hides.any(1).to(size.dtype)) > 0
        kind = (2 * size + masked)[team]
        each = slots.shape[1] * self.keys.width  # numbers that a team reads
        for together, has_mask in ((x // 2, bool(x % 2)) for x in kind.unique().tolist()):
            which = (kind == 2 * together + has_mask).nonzero().squeeze(1)
            for some in which.split(max(1, _WORKSPACE // each) * together):
                yield at[some], places[some], together, has_mask

    def attend(self, at: Tensor, places: Tensor, together: int, masked: bool) -> tuple[Tensor, Tensor]:
        """Attention of the rows `at` `[n]` to sets of their blocks, each set by itself.

        Args:
            places: where these blocks are in the lists, `[n, sets, blocks]`.
            together: of so many rows, one behind another, the sets hold the same keys.
            masked: some slots are empty, or hold keys that some query does not see.

        Returns:
            The output `[n, sets, q_block, Dv]`, and its lse `[n, sets, q_block]`.
        """
        sets, q_block = places.shape[1], self.queries.shape[1]
        leader = at[::together]
        slots = self.k_at.index_select(0, self._blocks(leader, places[::together]).flatten())
        slots = slots.view(len(leader), sets, -1)  # [teams, sets, keys]
        k, v = self.keys.at(slots.clamp_min(0) + self.first_key[leader, None, None])
        hidden = None
        if masked:
            empty = slots < 0
            # An empty slot reads key 0; its weight is 0, which must not meet an infinite value.
            for x in (k, v):
                x.masked_fill_(empty.unsqueeze(3), 0.0)
            hidden = empty.unsqueeze(2).expand(-1, -1, together * q_block, -1)
            if self.causal:
                hidden = hidden | (slots.unsqueeze(2) > self.q_at[at].view(-1, 1, together * q_block, 1))
        q = self.queries.index_select(0, at).view(-1, 1, together * q_block, self.queries.shape[2])
        out, lse = attention_with_lse(q.expand(-1, sets, -1, -1), k, v, self.scale, hidden=hidden)
        out, lse = (x.unflatten(2, (together, q_block)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
        return out, lse

    def _blocks(self, at: Tensor, places: Tensor) -> Tensor:
        """The blocks at `places` `[n, sets, blocks]` in the lists of the rows `at`, counted over all maps."""
        return self.columns[at[:, None, None], places] + self.first_block[at, None, None]

    def results(self) -> tuple[Tensor, Tensor]:
        """The output `[B, Hq, M, Dv]` laid out as q, and the lse `[B, Hq, M]`."""
        B, Hq, M, _ = self.q.shape
        query, place = self.places
        place_of = torch.empty_like(place).scatter_(0, query, place)
        lse = self.lse.flatten().index_select(0, place_of).view(B, Hq, M)
        out = empty_as(self.q, self.out.shape[-1], self.q.dtype)
        return out.copy_(self.out.flatten(0, 1).index_select(0, place_of).view(out.shape)), lse

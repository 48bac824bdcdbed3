"""The grid: how queries and keys are cut into blocks, and which original positions each block holds."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from blocksparse.check.validators import shown, size
from blocksparse.kernels.masks.blocks import Bounds, block_bounds, block_places
from blocksparse.kernels.masks.grid import BlockGrid, TokenPositions
from blocksparse.order.permutation import Permutation
from blocksparse.spec import AttentionSpec


@final
@frozen(eq=False, kw_only=True)
class Grid(BlockGrid):
    """Rows of `q_block` query slots by columns of `k_block` key slots.

    When causal, the queries are the last `q_len` of `k_len` positions. A query at position `p` sees the keys at `k
    <= p`, with a sliding window only those at `p - window < k <= p`. Rows are cut where those of the *whole*
    prompt are. When a chunk starts inside a block, the first `q_lead` slots of row 0 are empty. So a row means the
    same queries however the prompt is chunked. `visible`, `full` and `diagonal` follow from the first and the
    last original position of each block alone, for any permutation.

    A grid belongs to one permutation and holds it, so that scores, masks and executors can compare theirs.
    """

    permutation: Permutation
    batch: int
    q_heads: int
    kv_heads: int
    slots: int  # slots of one key map; they may be more or fewer than k_len where query groups have own maps
    q_position: Tensor  # [B|1, H|1, rows * q_block] int32, the original position in each slot, -1 where empty
    k_position: Tensor  # [B|1, H|1, G, cols * k_block] int32, the same of keys, for each key map
    group_of_row: Tensor | None  # [rows] int64, the key map each row uses; None when G == 1
    _finer: dict[int, Grid] = field(init=False, repr=False, factory=dict)  # the grids that `refined` made, by n

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec, *, q_block: int, k_block: int
    ) -> Grid:
        """The grid over `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]` in the slots of `permutation`.

        A window of at least N tokens hides nothing, and the grid is that without one.

        Raises:
            ValueError: `permutation` does not fit these q and k, or its query groups are not whole numbers of
                query blocks. Or the grid is causal with more queries than keys.
        """
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        causal = spec.causal
        if causal and M > N:
            raise ValueError(
                f"a causal grid needs at least as many keys as queries: Nq={M}, Nk={N}. Pass the cached keys too."
            )
        permutation.check_fits(q, k, causal=causal)
        offset = N - M if causal else 0
        q_position, k_position, bounds = block_places(
            q, k, permutation.q_index, permutation.k_index, q_block, k_block, offset=offset
        )
        group_of_row = None
        if permutation.group is not None:
            if permutation.group % q_block:
                raise ValueError(
                    f"a query group must be a whole number of query blocks: group={permutation.group}, "
                    f"q_block={q_block}. Choose a block that divides the segment."
                )
            first, rows = offset // q_block, q_position.shape[-1] // q_block
            start = torch.arange(first * q_block, (first + rows) * q_block, q_block, device=q.device)
            group_of_row = start // permutation.group - offset // permutation.group
        return cls(
            permutation=permutation,
            batch=B,
            q_len=M,
            k_len=N,
            q_block=q_block,
            k_block=k_block,
            q_heads=Hq,
            kv_heads=Hkv,
            causal=causal,
            slots=N if permutation.k_index is None else permutation.k_index.shape[-1],
            q_position=q_position,
            k_position=k_position,
            group_of_row=group_of_row,
            window=hiding(spec.window, N),
            remaining=spec.remaining,
            **_for_rows(bounds, group_of_row),
        )

    def check_fits(self, q: Tensor, k: Tensor, permutation: Permutation, spec: AttentionSpec) -> None:
        """Refuse a grid that was cut from another permutation, or for another call than this.

        Raises:
            ValueError: the grid was made for other sizes than those of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N,
                D]`. Or it was made for another permutation, or for a call with another `causal` or `window`.
        """
        mine = self._over
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        its = B, Hq, Hkv, M, N
        if mine != its:
            raise ValueError(
                f"these scores, or this mask, were made for tensors of other sizes: (B, Hq, Hkv, M, N) = {mine}, "
                f"and q and k have {its}. Make their grid with Grid.of(q, k, permutation, spec, ...)."
            )
        if not self.permutation.orders_as(permutation):
            raise ValueError(
                "these scores, or this mask, belong to another permutation than the one given, so that the same "
                "block means other tokens. Pass the permutation that Grid.of(q, k, permutation, spec, ...) got."
            )
        if spec.causal != self.causal:
            raise ValueError(
                f"these scores, or this mask, were made with causal={self.causal}, and the call has "
                f"causal={spec.causal}. Pass the spec of the call."
            )
        if (hides := hiding(spec.window, N)) != self.window:
            raise ValueError(
                f"these scores, or this mask, were made with window={self.window}, and the call has "
                f"window={hides}. Pass the spec of the call, Grid.of(q, k, permutation, spec, ...)."
            )

    def same_blocks(self, other: Grid) -> bool:
        """Whether block (i, j) means the same tokens in both grids, for all i and j."""
        return self is other or (
            (*self._over, self.causal, self.window, self.q_block, self.k_block)
            == (*other._over, other.causal, other.window, other.q_block, other.k_block)
            and self.permutation.orders_as(other.permutation)
        )

    def refined(self, n: int) -> Grid:
        """The same grid with blocks `n` times smaller on both sides. Each call with one `n` gives one object.

        Raises:
            ValueError: `n` does not divide both block sizes.
        """
        if n not in self._finer:
            self._finer[n] = self._refined(n)
        return self._finer[n]

    def _refined(self, n: int) -> Grid:
        size.check(n=n)
        if self.q_block % n or self.k_block % n:
            raise ValueError(
                f"'n' must divide both blocks ({self.q_block} x {self.k_block}): {shown(n)}. Give 1, 2 or 4, say."
            )
        q_block, k_block = self.q_block // n, self.k_block // n
        # A coarse block may begin or end with empty slots; fine blocks that hold nothing else are left out.
        before = self.q_lead // q_block * q_block
        after = before + -(-(self.q_lead - before + self.q_len) // q_block) * q_block
        group_of_row = None
        if self.group_of_row is not None:
            group_of_row = self.group_of_row.repeat_interleave(n)[before // q_block : after // q_block]
        q_position = self.q_position[..., before:after]
        k_position = self.k_position[..., : -(-self.slots // k_block) * k_block]
        return evolve(
            self,
            q_block=q_block,
            k_block=k_block,
            q_position=q_position,
            k_position=k_position,
            group_of_row=group_of_row,
            **_for_rows(block_bounds(q_position, k_position, q_block, k_block, self.q_heads), group_of_row),
        )

    @property
    def positions(self) -> TokenPositions:
        """The positions that attention kernels read."""
        order = self.permutation
        q_position, k_position = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (self.q_position, self.k_position)
        )
        return TokenPositions(
            q_position, k_position, self.group_of_row, self.q_lead, self.causal,
            order.q_index is None, order.k_index is None, self.window,
        )  # fmt: skip

    def shared(self) -> Grid:
        """The grid for one mask per KV head: the bounds of each block cover all query heads of the group."""

        def over_group(x: Tensor, reduce: str) -> Tensor:
            if x.shape[1] != self.q_heads:
                return x
            grouped = x.unflatten(1, (self.kv_heads, -1))
            result: Tensor = getattr(grouped, reduce)(2)
            return result

        if self.q_heads not in (x.shape[1] for x in (self.q_first, self.k_first)):
            return self
        bounds = {"q_first": "amin", "q_last": "amax", "k_first": "amin", "k_last": "amax", "k_whole": "all"}
        found: dict[str, Any] = {name: over_group(getattr(self, name), how) for name, how in bounds.items()}
        return evolve(self, **found)

    @property
    def _over(self) -> tuple[int, int, int, int, int]:
        """`(B, Hq, Hkv, M, N)` of the grid's q and k."""
        return self.batch, self.q_heads, self.kv_heads, self.q_len, self.k_len


def _for_rows(bounds: Bounds, group_of_row: Tensor | None) -> dict[str, Any]:
    """The first and the last position of each block as fields of a grid, those of keys for each row of blocks."""
    q_first, q_last, *of_keys = bounds
    if group_of_row is not None:
        of_keys = [x.index_select(2, group_of_row) for x in of_keys]
    k_first, k_last, k_whole = of_keys
    return {"q_first": q_first, "q_last": q_last, "k_first": k_first, "k_last": k_last, "k_whole": k_whole}


def hiding(window: int | None, k_len: int) -> int | None:
    """The window as far as it hides any of `k_len` keys from any query: None where it hides none."""
    return window if window is not None and window < k_len else None

"""Values: what a permuter gives. Always an index map; nothing is moved until an executor asks for it."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.kernels.gather_rows import gather_rows, gather_two, inverse, scatter_rows


@frozen(eq=False)
class Permutation:
    """Which token stands in which slot.

    Slot `j` of query group `g` reads key `k_index[b, h, g, j]`; `-1` marks an empty slot. A group is the `group`
    consecutive *original* positions that share one map, counted from position 0 of the keys, so that group
    `g` of a chunk is the same group in the whole prompt; a chunk lists the groups its queries lie in.
    Query slot `i` holds query `q_index[b, h, i]`. `None` leaves that side in place and costs nothing.
    """

    k_index: Tensor | None = None  # [B, H, G, slots] int32, H is Hkv or Hq; with groups, slots need not be N
    q_index: Tensor | None = None  # [B, Hq, M] int32
    group: int | None = None  # original positions per key map; None when one map serves every query (G == 1)

    def __attrs_post_init__(self) -> None:
        if self.k_index is not None and self.k_index.ndim != 4:
            raise ValueError(f"'k_index' must have the shape [B, H, G, N]: {tuple(self.k_index.shape)}")
        if self.q_index is not None and self.q_index.ndim != 3:
            raise ValueError(f"'q_index' must have the shape [B, Hq, M]: {tuple(self.q_index.shape)}")
        if self.group is None and self.k_index is not None and self.k_index.shape[2] != 1:
            raise ValueError(f"'group' must be given for more than one key map: G={self.k_index.shape[2]}")


@final
@frozen(eq=False)
class GlobalPermutation(Permutation):
    """One key map for all queries (`G == 1`): the only kind that may also be applied physically."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.group is not None:
            raise ValueError(f"'group' must be None: one map serves every query: {self.group}")

    @property
    def key_slots(self) -> Tensor | None:
        """The key in each slot, `[B, H, N]` int32; None when keys stay in place."""
        return None if self.k_index is None else self.k_index[:, :, 0]

    def gather_keys(self, x: Tensor) -> Tensor:
        """Keys or values `[B, Hkv, N, D]` in slot order, `[B, H, N, D]`. Free when keys stay in place."""
        slots = self.key_slots
        return x if slots is None else gather_rows(x, slots)

    def gather_keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`gather_keys` of both, `[B, Hkv, N, D]` and `[B, Hkv, N, Dv]`, at once: a GPU reads the map one time."""
        slots = self.key_slots
        return (k, v) if slots is None else gather_two(k, v, slots)

    def gather_queries(self, q: Tensor) -> Tensor:
        """Queries `[B, Hq, M, D]` in slot order. Free when queries stay in place."""
        return q if self.q_index is None else gather_rows(q, self.q_index)

    def restore(self, x: Tensor) -> Tensor:
        """Anything per query slot, `[B, Hq, M, ...]`, back in the order of the original queries."""
        return x if self.q_index is None else scatter_rows(x, self.q_index)

    def inverse(self) -> GlobalPermutation:
        """The map that undoes this one: key `n` stands in slot `inverse().k_index[b, h, 0, n]`."""
        return GlobalPermutation(
            k_index=None if self.k_index is None else inverse(self.k_index),
            q_index=None if self.q_index is None else inverse(self.q_index),
        )

"""The role of a permuter: q, k -> Permutation. Permutations are index maps, by which later stages gather."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Generic, TypeVar, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.stage import Stage
from blocksparse.check.validators import maybe_whole, optional, size
from blocksparse.kernels.layout.gather import gather_rows, gather_two, inverse, scatter_rows
from blocksparse.spec import AttentionSpec


def _rows_in_memory(index: Tensor | None) -> Tensor | None:
    """Converter: kernels need the last axis of a map to be consecutive in memory, so other maps are copied."""
    return index.contiguous() if isinstance(index, Tensor) and index.ndim and index.stride(-1) != 1 else index


def _is_an_index(dims: str) -> Any:
    """Validator: an int32 tensor of these dimensions, or None."""

    def validate(_: object, attribute: Any, index: Tensor | None) -> None:
        if index is None:
            return
        if not isinstance(index, Tensor):
            raise TypeError(f"'{attribute.name}' must be an int32 tensor {dims} or None: {type(index).__name__}")
        if index.ndim != dims.count(",") + 1:
            raise ValueError(f"'{attribute.name}' must have the shape {dims}: {tuple(index.shape)}")
        if index.dtype != torch.int32:
            raise TypeError(f"'{attribute.name}' must be int32: {index.dtype}. Convert it with .int().")

    return validate


@frozen(eq=False)
class Permutation:
    """The token in each slot: one key order for all queries, or one per query group.

    Slot `j` of query group `g` reads key `k_index[b, h, g, j]`; `-1` marks an empty slot. A query group is `group`
    consecutive *original* positions, whose queries share one map. Groups are counted from position 0 of the keys,
    so that a chunk is cut into the same groups as the whole prompt. A chunk has the maps of the groups in which
    its queries lie. Query slot `i` holds query `q_index[b, h, i]`. If an index is `None`, the keys or queries stay
    in place, which costs nothing.

    Shapes and dtypes are checked when a permutation is made and when it is used with q and k. The contents are
    not, since they would have to be read back from a GPU; `check_contents` does that on request, and
    `testing.check_permuter` does it for a permuter.

    Raises:
        TypeError: a map is not an int32 tensor.
        ValueError: a map has the wrong number of dimensions, or `group` does not fit it.
    """

    k_index: Tensor | None = field(
        default=None, converter=_rows_in_memory, validator=_is_an_index("[B, H, G, slots]")
    )  # H is Hkv or Hq; slots is N, or any number if `group` is given
    q_index: Tensor | None = field(default=None, converter=_rows_in_memory, validator=_is_an_index("[B, Hq, M]"))
    group: int | None = None  # original positions per key map; None when one map serves every query (G == 1)

    def __attrs_post_init__(self) -> None:
        if self.group is None and self.k_index is not None and self.k_index.shape[2] != 1:
            raise ValueError(f"'group' must be given for more than one key map: G={self.k_index.shape[2]}")
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ValueError(f"'group' must be a number of positions, at least 1: {self.group!r}. Give 128, say.")

    def orders_as(self, other: Permutation) -> bool:
        """Whether this permutation holds the same tensors as `other`; equal maps in other tensors do not count."""
        return self is other or (
            self.k_index is other.k_index and self.q_index is other.q_index and self.group == other.group
        )

    def check_fits(self, q: Tensor, k: Tensor, *, causal: bool) -> None:
        """Refuse maps whose sizes do not fit `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`. Reads no contents.

        Raises:
            ValueError: batch size, heads, groups, slots or device differ.
        """
        (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
        if self.q_index is not None:
            if self.q_index.shape != (B, Hq, M):
                raise ValueError(
                    f"'q_index' must have the shape [B, Hq, M] = {(B, Hq, M)}: {tuple(self.q_index.shape)}. "
                    "Give a slot for each query."
                )
            _check_device("q_index", self.q_index, q)
        if self.k_index is None:
            return
        _check_device("k_index", self.k_index, k)
        batch, heads, groups, slots = self.k_index.shape
        if batch != B or heads not in (Hkv, Hq):
            raise ValueError(
                f"'k_index' must have B={B} batch entries and Hkv={Hkv} or Hq={Hq} heads: "
                f"{tuple(self.k_index.shape)}. Use expand() for one map that serves all."
            )
        if self.group is None:
            if slots != N:
                raise ValueError(
                    f"'k_index' must name each of the {N} keys once: it has {slots} slots. "
                    "With 'group' a map may leave keys out."
                )
            return
        offset = N - M if causal else 0
        if groups != (expected := (offset + M - 1) // self.group - offset // self.group + 1):
            raise ValueError(
                f"'k_index' must have a key map for each group of {self.group} positions that queries {offset} to "
                f"{offset + M - 1} lie in, {expected} in all: {groups}. Groups count from token 0."
            )

    def check_contents(self, q: Tensor, k: Tensor) -> None:
        """Read the maps and refuse contents that no executor can follow. The host waits for the GPU.

        Raises:
            ValueError: a map names a token that does not exist, names a token twice, or leaves out a query. Or the
                only map of all queries leaves out a key.
        """
        if self.q_index is not None:
            _check_map("q_index", "query", self.q_index, q.shape[2], complete=True)
        if self.k_index is not None:
            _check_map("k_index", "key", self.k_index, k.shape[2], complete=self.group is None)

    def gather_queries(self, q: Tensor) -> Tensor:
        """Queries `[B, Hq, M, D]` in slot order; `q` itself if queries stay in place."""
        return q if self.q_index is None else gather_rows(q, self.q_index)

    def restore(self, x: Tensor) -> Tensor:
        """A tensor `[B, Hq, M, ...]` with entries per query slot, put back into the original order of queries."""
        return x if self.q_index is None else scatter_rows(x, self.q_index)


def _check_device(name: str, index: Tensor, x: Tensor) -> None:
    if index.device != x.device:
        raise ValueError(f"'{name}' must be on the device of q and k ({x.device}): {index.device}")


def _check_map(name: str, token: str, index: Tensor, tokens: int, *, complete: bool) -> None:
    """Refuse a map that names a token twice or one not from 0 to `tokens - 1`; -1 is allowed unless `complete`."""
    least = 0 if complete else -1
    ordered = index.sort(dim=-1).values
    if bool(((ordered < least) | (ordered >= tokens)).any()):
        worst = ordered[(ordered < least) | (ordered >= tokens)][0]
        empty = "" if complete else ", or be -1 for an empty slot"
        raise ValueError(f"'{name}' must name {token} 0 to {tokens - 1}{empty}: {int(worst)}")
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise ValueError(f"'{name}' must name each {token} once: {token} {int(ordered[..., 1:][twice][0])} twice")


@final
@frozen(eq=False)
class GlobalPermutation(Permutation):
    """One order of the keys that all queries share.

    There is one map (`G == 1`), so this is the only kind that may also be applied physically.

    `segment` is a promise of the permuter that every key stays inside its segment of that many original
    positions. Scorers then treat the segment in which a row of blocks lies as PBS-Attn does and force its blocks.
    """

    segment: int | None = field(default=None, converter=maybe_whole, validator=optional(size), kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.group is not None:
            raise ValueError(f"'group' must be None: one map serves every query: {self.group}. Leave it out.")

    def check_contents(self, q: Tensor, k: Tensor) -> None:
        super().check_contents(q, k)
        if self.segment is not None and self.k_index is not None:
            slot = torch.arange(self.k_index.shape[-1], device=self.k_index.device)
            strays = self.k_index // self.segment != slot // self.segment
            if bool(strays.any()):
                key = int(self.k_index[strays][0])
                raise ValueError(
                    f"'segment'={self.segment} says that every key stays inside its segment of so many positions, "
                    f"but 'k_index' moves key {key} out of it"
                )

    @cached_property  # each stage asks for it, and a view takes the host microseconds
    def key_slots(self) -> Tensor | None:
        """The key in each slot, `[B, H, N]` int32; None when keys stay in place."""
        return None if self.k_index is None else self.k_index.select(2, 0)

    def gather_keys(self, x: Tensor) -> Tensor:
        """Keys or values `[B, Hkv, N, D]` in slot order, `[B, H, N, D]`; `x` itself if keys stay in place."""
        slots = self.key_slots
        return x if slots is None else gather_rows(x, slots)

    def gather_keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`gather_keys` of `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]` together, which reads the map once."""
        slots = self.key_slots
        return (k, v) if slots is None else gather_two(k, v, slots)

    def inverse(self) -> GlobalPermutation:
        """The permutation that undoes this one: key `n` stands in slot `inverse().k_index[b, h, 0, n]`."""
        return GlobalPermutation(
            k_index=None if self.k_index is None else inverse(self.k_index),
            q_index=None if self.q_index is None else inverse(self.q_index),
            segment=self.segment,
        )


PermutationT_co = TypeVar("PermutationT_co", bound=Permutation, covariant=True)


class Permuter(Stage, ABC, Generic[PermutationT_co]):
    """Role: decides the order of the tokens. It returns an index map and moves no token."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> PermutationT_co:
        """Order `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`; if causal, query `i` has position `N - M + i`."""

    @property
    def moves_keys(self) -> bool:
        """Whether keys may move to other slots. False promises that `k_index` is None."""
        return True


@final
@frozen(cache_hash=True)
class Identity(Permuter[GlobalPermutation]):
    """Leave every token where it is. Costs nothing: no index map is made."""

    moves_keys = False
    by_row = True

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        return GlobalPermutation()

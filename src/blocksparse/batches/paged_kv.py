"""`PagedKV`: the keys and values of one request where they lie, in the pages of a cache."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.checks.validators import shown

LEAST_RUN = 16
"""Tokens that one copy of the kernel for Hopper takes at least."""
_MOST_SLOTS = 2**30  # a number from there on means "nowhere" to the kernel for Hopper


@final
@frozen(eq=False)
class PagedKV:
    """Keys and values of one request in a cache that holds others as well. `PageTable.in_place` makes it.

        kv = table.in_place(request, keys, values)
        out = PagedPipeline(pipeline)(q, kv)

    The cache is seen as one row of slots for each head (`flat`), so that one number says where a token lies.

    Args:
        keys: `[1, Hkv, slots, D]`, as `flat` gives them.
        values: `[1, Hkv, slots, Dv]`, likewise.
        slots: `[1, 1, N]` int32, the slot of each token.
        run: so many tokens, a power of two, lie one behind another, from each multiple of it on.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    run: int = field(kw_only=True)

    @property
    def k(self) -> Tensor:
        """A stand-in for the keys with their sizes, `[1, Hkv, N, D]`, whose numbers mean nothing."""
        return self.keys[:, :, :1].expand(-1, -1, self.slots.shape[2], -1)

    @property
    def v(self) -> Tensor:
        """The same for the values, `[1, Hkv, N, Dv]`."""
        return self.values[:, :, :1].expand(-1, -1, self.slots.shape[2], -1)

    @property
    def key_slots(self) -> Tensor:
        """The slot of each key of each head, `[1, Hkv, N]` int32: one row, seen once for each head."""
        return self.slots.expand(-1, self.keys.shape[1], -1)


def lies_in_slots(cache: Tensor) -> bool:
    """Whether one row of slots runs through all pages of a cache `[pages, Hkv, page_size, D]`."""
    page, _, slot, inner = cache.stride()
    return inner == 1 and slot > 0 and page % slot == 0 and len(cache) * (page // slot) < _MOST_SLOTS


def slots_per_page(cache: Tensor) -> int:
    """How many slots lie from the begin of one page to that of the next, in a cache `[pages, Hkv, page_size, D]`.

    Raises:
        ValueError: no row of slots runs through all pages.
    """
    if not lies_in_slots(cache):
        raise ValueError(
            "the cache must have numbers of a token one behind another, pages whole numbers of tokens apart, and "
            "fewer than 2**30 tokens from its first to its last page: "
            f"{shown(cache)} with strides {cache.stride()}"
        )
    return cache.stride(0) // cache.stride(2)


def flat(cache: Tensor, apart: int) -> Tensor:
    """A view of a cache `[pages, Hkv, page_size, D]` as `[1, Hkv, slots, D]`, whose slots may share memory.

    `apart` is `slots_per_page(cache)`: slot `s` of page `p` is slot `p * apart + s`. Slots between pages, where
    heads of a page lie behind one another, are other heads' and belong to no token here.
    """
    (pages, heads, page_size, D), (_, of_heads, of_slots, _) = cache.shape, cache.stride()
    slots = (pages - 1) * apart + page_size
    return cache.as_strided((1, heads, slots, D), (slots * of_slots, of_heads, of_slots, 1))


def slots_of(pages: Tensor, tokens: int, page_size: int, apart: int) -> Tensor:
    """The slot of each token of a request, `[1, 1, tokens]` int32, from its `pages`, int32 and in order."""
    token = torch.arange(tokens, dtype=torch.int32, device=pages.device)
    return (pages[token // page_size] * apart + token % page_size)[None, None]

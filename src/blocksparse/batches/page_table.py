"""`PageTable` says in which pages of a cache the keys and values of requests lie, and reads them from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.batches.sequences import Sequences
from blocksparse.checks.inputs import DTYPES
from blocksparse.checks.validators import block_size, numbers_on_host, shown, whole
from blocksparse.kernels.moving.gather_rows import gather_two


def _lengths(lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
    return tuple(numbers_on_host("lengths", lengths))


@final
@frozen(eq=False)
class PageTable:
    """Where the tokens of several requests lie in a paged cache. Make it once, and use it for all layers.

        table = PageTable(block_table, lengths, page_size=16)
        k, v = table.gather(keys, values)
        pipeline(q, k, v, sequences=table.sequences(query_lengths))

    Token `t` of request `r` lies in slot `t % page_size` of page `block_table[r, t // page_size]`. Requests may
    share pages, and pages may stand in any order. Entries behind the last page of a request are not read. Later
    writes to `block_table` change nothing.

    Args:
        block_table: `[requests, pages of the longest]` int32 or int64, on the device of the cache.
        lengths: the tokens of each request, as whole numbers or as a tensor of them, `[requests]`. The host waits
            for a tensor that is on a GPU.
        page_size: the tokens of a page.

    Raises:
        TypeError: `block_table` or `lengths` do not hold whole numbers.
        ValueError: sizes do not fit, or a page is below 0. This looks at pages in a table on a CPU, but not in one
            on a GPU: a page that does not exist is then read from wherever it would be.
    """

    block_table: Tensor
    lengths: tuple[int, ...] = field(converter=_lengths)
    page_size: int = field(converter=whole, kw_only=True)
    _page: Tensor = field(  # [tokens], the page of every token of every request
        init=False, repr=False, default=Factory(lambda self: self._pages(), takes_self=True)
    )
    _slot: Tensor = field(  # [tokens], its slot in that page
        init=False, repr=False, default=Factory(lambda self: self._slots(), takes_self=True)
    )

    def _pages(self) -> Tensor:
        table = self.block_table
        block_size.check(page_size=self.page_size)
        if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"'block_table' must be a tensor of int32 or int64: {shown(table)}")
        if table.ndim != 2 or table.shape[0] != len(self.lengths):
            raise ValueError(
                f"'block_table' must have a row for each of {len(self.lengths)} lengths: {shown(table)}"
            )
        room = table.shape[1] * self.page_size
        for request, length in enumerate(self.lengths):
            if not 0 <= length <= room:
                raise ValueError(
                    f"'lengths' must be from 0 to {room}, the pages of a row of 'block_table' ({table.shape[1]}) "
                    f"times 'page_size' ({self.page_size}): request {request} has {length}"
                )
        rows = [
            row[: -(-length // self.page_size)].repeat_interleave(self.page_size)[:length]
            for row, length in zip(table, self.lengths, strict=True)
        ]
        pages = torch.cat(rows) if rows else table.new_zeros(0)
        if pages.device.type == "cpu" and bool((wrong := (pages < 0) | (pages > 2**31 - 1)).any()):
            raise ValueError(
                f"'block_table' must name pages from 0 on, below 2**31, for every token: {int(pages[wrong][0])}"
            )
        return pages.to(torch.int32)

    def _slots(self) -> Tensor:
        slots = [torch.arange(length, dtype=torch.int32, device=self._page.device) for length in self.lengths]
        return torch.cat(slots) % self.page_size if slots else self._page

    def sequences(self, query_lengths: Sequence[int] | Tensor) -> Sequences:
        """The requests with so many queries each, for a call with `q` `[1, Hq, sum(query_lengths), D]`.

        Raises:
            TypeError, ValueError: as of `Sequences.packed`.
        """
        return Sequences.packed(query_lengths, self.lengths)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all requests behind one another, `[1, Hkv, sum(lengths), D]` and `[..., Dv]`.

        Args:
            keys: the cache of one layer, `[pages, Hkv, page_size, D]`, with any strides.
            values: `[pages, Hkv, page_size, Dv]`. Of a cache `[pages, Hkv, page_size, 2D]` that holds both, these
                are the halves `cache.split(D, dim=-1)`. Where tokens stand before heads, transpose both.

        Raises:
            TypeError: keys and values are not in one floating-point dtype that pipelines take; fp8 is none.
            ValueError: their sizes or devices do not fit each other or the table, one of them requires grad, or a
                page of a table on a CPU does not exist.
        """
        self._check(keys, values)
        step = _rows_per_page(keys)
        if step is None or step != _rows_per_page(values):
            page, slot = self._page, self._slot
            return keys[page, :, slot].transpose(0, 1)[None], values[page, :, slot].transpose(0, 1)[None]
        index = (self._page * step + self._slot).expand(1, keys.shape[1], -1)
        found: tuple[Tensor, Tensor] = gather_two(_as_rows(keys, step), _as_rows(values, step), index)
        return found

    def _check(self, keys: Tensor, values: Tensor) -> None:
        for name, x in (("keys", keys), ("values", values)):
            if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.dtype != keys.dtype:
                raise TypeError(
                    f"'{name}' must be a tensor of float16, bfloat16, float32 or float64, the same for keys and "
                    f"values: {shown(x)}; caches in 8 bits must be converted first"
                )
            if x.ndim != 4 or x.shape[:3] != keys.shape[:3] or x.shape[2] != self.page_size:
                raise ValueError(
                    f"'{name}' must have the shape [pages, Hkv, {self.page_size}, D], with pages and heads as "
                    f"the keys have them: {shown(x)}"
                )
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"'{name}' must not require grad, as no gradients are computed: {shown(x)}")
            if x.device != self._page.device:
                raise ValueError(f"'{name}' must be on the device of the table ({self._page.device}): {x.device}")
        if self._page.device.type == "cpu" and len(self._page) and (last := int(self._page.max())) >= len(keys):
            raise ValueError(f"'block_table' must name pages of the cache, 0 to {len(keys) - 1}: {last}")


def _rows_per_page(x: Tensor) -> int | None:
    """From one page to the next in steps from slot to slot, if that is a whole number and fits an int32."""
    page, _, slot, dim = x.stride()
    if x.numel() == 0 or dim != 1 or slot < 1 or page % slot or len(x) * (page // slot) + x.shape[2] >= 2**31:
        return None
    return page // slot


def _as_rows(x: Tensor, step: int) -> Tensor:
    """The cache as rows, `[1, Hkv, rows, D]`: slot `s` of page `p` is row `p * step + s` of its head."""
    pages, heads, slots, D = x.shape
    rows = (pages - 1) * step + slots
    return x.as_strided((1, heads, rows, D), (0, x.stride(1), x.stride(2), 1))

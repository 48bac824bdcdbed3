"""Keys and values of several requests in the pages of a cache: `PageTable`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.batch.sequences import Sequences
from blocksparse.check.validators import block_size, count, numbers_on_host, shown, whole
from blocksparse.kernels.layout.gather import gather_pages
from blocksparse.launch.torch_modes import DTYPES


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
        lengths: tokens of each request, whole numbers or a tensor `[requests]`. The host waits for a tensor that
            is on a GPU.
        page_size: the tokens of a page.

    Attributes:
        pages: the pages of each request in order, `[pages of the request]` int32.

    Raises:
        TypeError: `block_table` or `lengths` do not hold whole numbers.
        ValueError: sizes do not fit, or a page is below 0. Page numbers are checked on a CPU only. On a GPU, a
            page number outside the cache reads memory outside it.
    """

    block_table: Tensor
    lengths: tuple[int, ...] = field(converter=_lengths)
    page_size: int = field(converter=whole, kw_only=True)
    pages: tuple[Tensor, ...] = field(
        init=False, repr=False, default=Factory(lambda self: self._of_requests(), takes_self=True)
    )

    def _of_requests(self) -> tuple[Tensor, ...]:
        table = self.block_table
        block_size.check(page_size=self.page_size)
        if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"'block_table' must be a tensor of int32 or int64: {shown(table)}. "
                "Make it by torch.tensor(..., dtype=torch.int32)."
            )
        if table.ndim != 2 or table.shape[0] != len(self.lengths):
            raise ValueError(
                f"'block_table' must have a row for each of {len(self.lengths)} lengths: {shown(table)}. "
                "Give PageTable the lengths of all requests."
            )
        room = table.shape[1] * self.page_size
        for request, length in enumerate(self.lengths):
            if not 0 <= length <= room:
                raise ValueError(
                    f"'lengths' must be from 0 to {room}, the pages of a row of 'block_table' ({table.shape[1]}) "
                    f"times 'page_size' ({self.page_size}): request {request} has {length}. "
                    "Give a wider block table."
                )
        counts = [-(-length // self.page_size) for length in self.lengths]
        if table.device.type == "cpu":
            for row, pages in zip(table, counts, strict=True):
                if bool((wrong := (row[:pages] < 0) | (row[:pages] > 2**31 - 1)).any()):
                    raise ValueError(
                        "'block_table' must name pages from 0 on, below 2**31, for every token: "
                        f"{int(row[:pages][wrong][0])}"
                    )
        kept = table.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        return tuple([row[:pages] for row, pages in zip(kept, counts, strict=True)])

    def sequences(
        self, query_lengths: Sequence[int] | Tensor, *, remaining: Sequence[int] | Tensor | None = None
    ) -> Sequences:
        """The `Sequences` of a call of these requests with `q` `[1, Hq, sum(query_lengths), D]`.

        Args:
            query_lengths: the queries of each request, its last tokens.
            remaining: for each request the tokens of its prompt after these. None if None.

        Raises:
            TypeError, ValueError: as in `Sequences.packed`.
        """
        return Sequences.packed(query_lengths, self.lengths, remaining=remaining)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all requests behind one another, `[1, Hkv, sum(lengths), D]` and `[..., Dv]`.

        Args:
            keys: the cache of one layer, `[pages, Hkv, page_size, D]`, with any strides.
            values: `[pages, Hkv, page_size, Dv]`. Of a cache `[pages, Hkv, page_size, 2D]` that holds both, these
                are the halves `cache.split(D, dim=-1)`. Where tokens stand before heads, transpose both.

        Raises:
            TypeError: keys and values do not have one floating-point dtype that pipelines take. They do not take
                fp8.
            ValueError: their sizes or devices do not fit each other or the table, one of them requires grad, or a
                page of a table on a CPU does not exist.
        """
        self._check(keys, values)
        k, v = (x.new_empty((1, x.shape[1], sum(self.lengths), x.shape[3])) for x in (keys, values))
        parts = k.split(self.lengths, 2), v.split(self.lengths, 2)
        for pages, k_part, v_part in zip(self.pages, *parts, strict=True):
            if len(pages):
                gather_pages(keys, values, pages, k_part, v_part)
        return k, v

    def gather_one(self, request: int, keys: Tensor, values: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of one request, `[1, Hkv, length, D]` and `[..., Dv]`, in given memory.

        Args:
            request: its row in the table, from 0 on.
            keys: as in `gather`.
            values: as in `gather`.
            into: contiguous memory outside the cache. In its dtype, on its device, with room for both.

        Raises:
            TypeError, ValueError: as in `gather`. Or the request does not exist, or `into` is too small, shares
                memory with the cache, or requires grad.
        """
        self._check(keys, values)
        count.check(request=request)
        if request >= len(self.lengths):
            raise ValueError(
                f"'request' must be below {len(self.lengths)}, the rows of the table: {request}. "
                "Rows count from 0."
            )
        N = self.lengths[request]
        needed = N * keys.shape[1] * (keys.shape[3] + values.shape[3])
        if into.numel() < needed or into.dtype != keys.dtype or not into.is_contiguous():
            raise ValueError(
                f"'into' must be contiguous and have room for {needed} numbers of {keys.dtype}, the keys and "
                f"values of {N} tokens: {shown(into)}. Or call gather(), which allocates."
            )
        if into.device != keys.device:
            raise ValueError(
                f"'into' must be on the device of the cache ({keys.device}): {into.device}. "
                "Make it by keys.new_empty()."
            )
        if into.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"'into' must not require grad, as no gradients are computed: {shown(into)}. "
                "Make it under torch.no_grad()."
            )
        memory = into.untyped_storage().data_ptr()
        if any(memory == x.untyped_storage().data_ptr() for x in (keys, values)):
            raise ValueError(
                f"'into' must not share memory with the cache, which it would write to: {shown(into)}. "
                "Allocate other memory."
            )
        return gathered(keys, values, self.pages[request], N, into)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        device = self.block_table.device
        for name, x in (("keys", keys), ("values", values)):
            if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.dtype != keys.dtype:
                raise TypeError(
                    f"'{name}' must be a tensor of float16, bfloat16, float32 or float64, the same for keys and "
                    f"values: {shown(x)}. Caches in 8 bits must be converted first."
                )
            if x.ndim != 4 or x.shape[:3] != keys.shape[:3] or x.shape[2] != self.page_size:
                raise ValueError(
                    f"'{name}' must have the shape [pages, Hkv, {self.page_size}, D], with pages and heads as the "
                    f"keys have them: {shown(x)}. Transpose a cache that has tokens before heads."
                )
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"'{name}' must not require grad, as no gradients are computed: {shown(x)}")
            if x.device != device:
                raise ValueError(
                    f"'{name}' must be on the device of the table ({device}): {x.device}. "
                    "Move the table to that of the cache."
                )
        if keys.device.type == "cpu":
            last = max([int(pages.max()) for pages in self.pages if len(pages)], default=0)
            if last >= len(keys):
                raise ValueError(
                    f"'block_table' must name pages of the cache, 0 to {len(keys) - 1}: {last}. "
                    "Give the cache that the table was made for."
                )


def gathered(keys: Tensor, values: Tensor, pages: Tensor, tokens: int, into: Tensor) -> tuple[Tensor, Tensor]:
    """`PageTable.gather_one` of these pages of a request, unchecked."""
    Hkv, room = keys.shape[1], into.view(-1)
    shapes = (1, Hkv, tokens, keys.shape[3]), (1, Hkv, tokens, values.shape[3])
    first, both = (Hkv * tokens * width for width in (keys.shape[3], keys.shape[3] + values.shape[3]))
    k, v = room[:first].view(shapes[0]), room[first:both].view(shapes[1])
    if tokens:
        gather_pages(keys, values, pages, k, v)
    return k, v

"""Which requests of a batch go sparse, why the others do not, and where the rows of the former lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from blocksparse.batch.pages import PageTable


@final
@frozen
class Runs:
    """Ranges of rows, `(first, last + 1)` each, in order and apart from one another."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[int]) -> Runs:
        """The fewest ranges that hold exactly these rows, which rise."""
        ranges: list[tuple[int, int]] = []
        for row in rows:
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + 1)
            else:
                ranges.append((row, row + 1))
        return cls(tuple(ranges))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(start, stop) for start, stop in self.ranges)

    def __str__(self) -> str:
        """`0-2, 5`."""
        return ", ".join(f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in self.ranges)

    def of_tokens(self, starts: Sequence[int]) -> Runs:
        """The tokens of these requests; those of request `i` are `starts[i]` to `starts[i + 1] - 1`."""
        ranges = [(starts[start], starts[stop]) for start, stop in self.ranges]
        return Runs(tuple((start, stop) for start, stop in ranges if stop > start))

    def take(self, x: Any) -> Any:
        """These rows of a tensor or an array: a view if they are one range."""
        parts = [x[start:stop] for start, stop in self.ranges]
        if len(parts) == 1:
            return parts[0]
        if isinstance(x, Tensor):
            return torch.cat(parts) if parts else x[:0]
        return np.concatenate(parts) if parts else x[:0]

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Write `rows` where `take` reads them. What is a view of `x` is there already."""
        if len(self.ranges) > 1:
            sizes = [stop - start for start, stop in self.ranges]
            for (start, stop), part in zip(self.ranges, rows.split(sizes), strict=True):
                x[start:stop] = part


@final
@frozen(eq=False)
class Prefills:
    """The prompts, or chunks of prompts, that go sparse in one step.

    Args:
        table: the pages of each.
        rows: their queries in the batch, (first, last + 1).
        remaining: later tokens of each prompt. 0 where the engine does not tell.
    """

    table: PageTable
    rows: tuple[tuple[int, int], ...]
    remaining: tuple[int, ...]

    @classmethod
    def of(
        cls,
        requests: Runs,
        pages: Tensor,
        *,
        starts: Sequence[int],
        keys: Sequence[int],
        page_size: int,
        remaining: Sequence[int] | None = None,
    ) -> Prefills:
        """Those of `requests`, whose pages are `[requests, pages]`; the rest is as in `Split.of`."""
        table = PageTable(pages, [keys[request] for request in requests], page_size=page_size)
        rows = tuple([(starts[request], starts[request + 1]) for request in requests])
        return cls(table, rows, tuple([0 if remaining is None else remaining[request] for request in requests]))

    @cached_property
    def longest_first(self) -> list[int]:
        """The requests by their work, so that a GPU is at work on the first while the host prepares the others."""

        def work(request: int) -> int:
            start, stop = self.rows[request]
            return (stop - start) * self.table.lengths[request]

        return sorted(range(len(self.rows)), key=work, reverse=True)


@final
@frozen
class Split:
    """The requests of one batch in two parts, by their index."""

    sparse: Runs
    rest: Runs
    # Why those of `rest` are dense. Requests without queries, which pad a batch, count nowhere.
    reasons: Counter[str]
    queries: Counter[str]  # by the same reasons, and of those that are "sparse"

    @property
    def prompts(self) -> Counter[str]:
        """The number of requests, by the same reasons, and of those that are "sparse"."""
        return self.reasons + Counter(sparse=len(self.sparse))

    @staticmethod
    def sparsest(splits: Iterable[Split]) -> Split:
        """The split in which most requests are sparse."""
        return max(splits, key=lambda split: len(split.sparse))

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        keys: Sequence[int],
        *,
        min_tokens: int,
        min_queries: int,
        pays: Callable[[int, int, int], str | None] = lambda *_: None,
        remaining: Sequence[int] | None = None,
        dense: str | None = None,
        own: Mapping[int, str] = MappingProxyType({}),
    ) -> Split:
        """Split a batch of prompts, chunks of prompts, and requests that decode.

        Args:
            starts: first query of each request, and the end of the last one. `[0, 5, 9]`, say.
            keys: tokens of each request, context and queries together.
            min_tokens: shorter requests are dense.
            min_queries: requests with fewer queries are dense.
            pays: gives the reason why a request of these sizes is dense. None if it pays.
            remaining: later tokens of each prompt. None if the engine does not tell.
            dense: why the whole batch is dense, if it is.
            own: why single requests are dense, by their index.
        """
        sparse: list[int] = []
        rest: list[int] = []
        reasons, tokens_of = Counter[str](), Counter[str]()
        for request, ((start, stop), tokens) in enumerate(zip(pairwise(starts), keys, strict=True)):
            queries = stop - start
            if queries == 1:
                reason: str | None = "decode"
            elif dense is not None:
                reason = dense
            elif queries < min_queries:
                reason = "fewer than min_queries"
            elif tokens < max(min_tokens, queries):  # a trial run may have fewer tokens than queries
                reason = "fewer than min_tokens"
            elif request in own:
                reason = own[request]
            else:
                reason = pays(queries, tokens, 0 if remaining is None else remaining[request])
            (sparse if reason is None else rest).append(request)
            tokens_of[reason or "sparse"] += queries
            if reason is not None and queries:
                reasons[reason] += 1
        return cls(Runs.of(sparse), Runs.of(rest), reasons, tokens_of)

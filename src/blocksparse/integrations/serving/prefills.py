"""`Prefills`: where the prompts of one step lie that go sparse, in the batch and in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.batch.pages import PageTable
from blocksparse.integrations.serving.runs import Runs


@final
@frozen(eq=False)
class Prefills:
    """The prompts, or chunks of prompts, that go sparse in one step.

    Args:
        table: the pages of each.
        rows: their queries in the batch, (first, last + 1).
        remaining: for each the tokens of its prompt after these; 0 where the engine does not tell.
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
        """
        Args:
            requests: those that go sparse.
            pages: the pages of these requests, `[requests, pages]`.
            starts: where the queries of each request of the batch begin, and where those of the last one end.
            keys: the tokens of each request of the batch, its context and its queries together.
            remaining: the tokens of the prompt of each request of the batch after these, if the engine tells.
        """
        table = PageTable(pages, [keys[request] for request in requests], page_size=page_size)
        rows = tuple([(starts[request], starts[request + 1]) for request in requests])
        return cls(table, rows, tuple([0 if remaining is None else remaining[request] for request in requests]))

    def longest_first(self) -> list[int]:
        """The requests by their work, so that a GPU is at work on the first while the host prepares the others."""

        def work(request: int) -> int:
            start, stop = self.rows[request]
            return (stop - start) * self.table.lengths[request]

        return sorted(range(len(self.rows)), key=work, reverse=True)

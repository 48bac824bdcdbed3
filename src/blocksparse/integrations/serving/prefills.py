"""`Prefills`: where the prompts of one step lie that go sparse, in the batch and in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.batches.page_table import PageTable
from blocksparse.batches.sequences import Sequences
from blocksparse.integrations.serving.runs import Runs


@final
@frozen(eq=False)
class Prefills:
    """The prompts, or chunks of prompts, that go sparse in one step."""

    tokens: Runs
    table: PageTable
    sequences: Sequences

    @classmethod
    def of(
        cls, requests: Runs, pages: Tensor, *, starts: Sequence[int], keys: Sequence[int], page_size: int
    ) -> Prefills:
        """
        Args:
            requests: those that go sparse.
            pages: the pages of these requests, `[requests, pages]`.
            starts: where the queries of each request of the batch begin, and where those of the last one end.
            keys: the tokens of each request of the batch, its context and its queries together.
        """
        table = PageTable(pages, [keys[request] for request in requests], page_size=page_size)
        sequences = table.sequences([starts[request + 1] - starts[request] for request in requests])
        return cls(requests.of_tokens(starts), table, sequences)

"""Which requests of a batch go sparse, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

from attrs import frozen

from blocksparse.integrations.serving.runs import Runs


@final
@frozen
class Split:
    """The requests of one batch in two parts, by their index."""

    sparse: Runs
    rest: Runs
    # Why those of `rest` are dense. Requests without queries, which pad a batch, count nowhere.
    reasons: Counter[str]
    queries: Counter[str]  # by the same reasons, and of those that are "sparse"

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
        masked: frozenset[int] = frozenset(),
    ) -> Split:
        """Split a batch of prompts, chunks of prompts, and requests that decode.

        Args:
            starts: where the queries of each request begin, and where those of the last one end.
            keys: the tokens of each request, its context and its queries together.
            min_tokens: requests of fewer tokens than this are dense.
            min_queries: requests with fewer queries than this are dense.
            pays: why a request with so many queries, keys, and tokens of its prompt after these is dense, or None.
            remaining: the tokens of the prompt of each request after these; none if None.
            dense: why the whole batch is dense, if it is.
            masked: requests with a mask of their own.
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
            elif request in masked:
                reason = "mask"
            else:
                reason = pays(queries, tokens, 0 if remaining is None else remaining[request])
            (sparse if reason is None else rest).append(request)
            tokens_of[reason or "sparse"] += queries
            if reason is not None and queries:
                reasons[reason] += 1
        return cls(Runs.of(sparse), Runs.of(rest), reasons, tokens_of)

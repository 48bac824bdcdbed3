"""`Sequences`: the positions of several prompts in one q, k and v, packed one behind the other, or padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import count, is_whole, numbers_on_host, shown, whole
from blocksparse.launch.torch_private import OpaqueBase, opaque_object
from blocksparse.spec import AttentionSpec


class Span(NamedTuple):
    """Where one sequence lies: in which entry of the batch, and which queries and keys of it are its own."""

    entry: int
    first_query: int
    queries: int
    first_key: int
    keys: int

    def rows(self, x: Tensor) -> Tensor:
        """The queries of this sequence, a view of `x` `[B, H, M, D]`: `[1, H, queries, D]`."""
        return x.narrow(0, self.entry, 1).narrow(2, self.first_query, self.queries)

    def columns(self, x: Tensor) -> Tensor:
        """The keys of this sequence, a view of `x` `[B, H, N, D]`: `[1, H, keys, D]`."""
        return x.narrow(0, self.entry, 1).narrow(2, self.first_key, self.keys)


def _spans(spans: Iterable[Iterable[int]]) -> tuple[Span, ...]:
    if not isinstance(spans, Sequence) or isinstance(spans, str | bytes):
        raise TypeError(
            f"'spans' must be a sequence of spans: {shown(spans)}. Sequences.packed(lengths) makes them."
        )
    for span in spans:
        if not isinstance(span, Sequence) or len(span) != 5 or not all(map(is_whole, span)):
            raise TypeError(
                "'spans' must have five whole numbers each, (entry, first query, queries, first key, keys): "
                f"{shown(span)}"
            )
    return tuple(Span(*map(whole, span)) for span in spans)


def _remaining(numbers: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers_on_host("remaining", numbers))


@final
@frozen(eq=False)
class Sequences(OpaqueBase):
    """Prompts that share one q, k and v. A pipeline runs each by itself, as if it were called with it alone.

        Sequences.packed([300, 57, 1200])          # q, k and v [1, H, 1557, D]
        Sequences.padded(attention_mask)           # q, k and v [B, H, N, D], attention_mask [B, N]

        pipeline(q, k, v, sequences=sequences)

    The numbers are known to the host, so no call waits for a GPU because of them. Make the value once, and use it
    for all layers of a model. Rows of q that belong to no sequence, or to one without keys, have the output 0.
    Sequences may share keys, but not queries. A compiled graph takes any `Sequences` without being compiled again.

    Args:
        spans: (entry of the batch, first query, queries, first key, keys) of every sequence. In causal calls its
            queries are its last tokens.
        batch: entries of the batch.
        queries: tokens of q.
        keys: tokens of k and v.
        remaining: later tokens of each prompt. None if each sequence ends its prompt.

    Raises:
        TypeError: one of the numbers is not a whole number.
        ValueError: a span is not inside these sizes, or two spans have queries in common. Or `remaining` does not
            have one number per sequence, at least 0.
    """

    spans: tuple[Span, ...] = field(converter=_spans)
    batch: int = field(converter=whole, validator=count, kw_only=True)
    queries: int = field(converter=whole, validator=count, kw_only=True)
    keys: int = field(converter=whole, validator=count, kw_only=True)
    remaining: tuple[int, ...] | None = field(default=None, converter=_remaining, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.remaining is not None:
            if len(self.remaining) != len(self.spans):
                raise ValueError(
                    f"'remaining' must have an entry per sequence ({len(self.spans)}): {len(self.remaining)}. "
                    "Give 0 where a prompt ends."
                )
            if min(self.remaining, default=0) < 0:
                raise ValueError(f"'remaining' must not be below 0: {shown(self.remaining)}")
        for span in self.spans:
            entry, first_query, queries, first_key, keys = span
            if min(span) < 0 or entry >= self.batch:
                raise ValueError(f"'spans' must lie in one of {self.batch} entries of the batch: {span}")
            if first_query + queries > self.queries or first_key + keys > self.keys:
                raise ValueError(
                    f"'spans' must lie in {self.queries} queries and {self.keys} keys: {span}. Give larger sizes."
                )
        for one, other in pairwise(sorted(span for span in self.spans if span.queries)):
            if one.entry == other.entry and one.first_query + one.queries > other.first_query:
                raise ValueError(
                    f"'spans' must not share queries: {one} and {other}. Give each query to one sequence."
                )

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int] | Tensor,
        key_lengths: Sequence[int] | Tensor | None = None,
        *,
        remaining: Sequence[int] | Tensor | None = None,
    ) -> Sequences:
        """Sequences that stand behind one another along the token axis: `q` `[1, Hq, sum(lengths), D]`.

        Args:
            lengths: the queries of each sequence, as whole numbers or as a tensor of them, `[sequences]`. The host
                waits for a tensor that is on a GPU.
            key_lengths: the keys of each sequence. As many as its queries if None.
            remaining: as in the class.

        Raises:
            TypeError: the lengths are not whole numbers.
            ValueError: a length is below 0, or there are not as many key lengths as lengths.
        """
        queries = numbers_on_host("lengths", lengths)
        keys = queries if key_lengths is None else numbers_on_host("key_lengths", key_lengths)
        for name, numbers in (("lengths", queries), ("key_lengths", keys)):
            if min(numbers, default=0) < 0:
                raise ValueError(f"'{name}' must not be below 0: {shown(numbers)}")
        if len(queries) != len(keys):
            raise ValueError(
                f"'key_lengths' must have an entry per sequence ({len(queries)}): {len(keys)}. "
                "Leave it out where no prompt has a cache."
            )
        spans, first_query, first_key = [], 0, 0
        for M, N in zip(queries, keys, strict=True):
            spans.append(Span(0, first_query, M, first_key, N))
            first_query, first_key = first_query + M, first_key + N
        return cls(spans, batch=1, queries=first_query, keys=first_key, remaining=remaining)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Sequence[int] | Tensor,
        cu_seqlens_k: Sequence[int] | Tensor | None = None,
        *,
        remaining: Sequence[int] | Tensor | None = None,
    ) -> Sequences:
        """`packed`, from where each sequence begins and the last one ends, `[sequences + 1]`.

        Raises:
            TypeError: the entries are not whole numbers.
            ValueError: they do not begin with 0 and rise, or the two differ in length.
        """
        lengths = _steps("cu_seqlens_q", cu_seqlens_q)
        if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:  # the host need not wait for it twice
            return cls.packed(lengths, remaining=remaining)
        return cls.packed(lengths, _steps("cu_seqlens_k", cu_seqlens_k), remaining=remaining)

    @classmethod
    def padded(
        cls, attention_mask: Tensor, *, queries: int | None = None, remaining: Sequence[int] | Tensor | None = None
    ) -> Sequences:
        """A sequence in each entry of a batch, with padding before it or behind it.

        The host waits once for a mask that is on a GPU.

        Args:
            attention_mask: `[B, N]`, whole numbers or bools. True for the tokens of the prompt, and 0 for padding.
            queries: how many of the N tokens are queries, the last ones. All if None.
            remaining: as in the class.

        Raises:
            TypeError: the mask is not a tensor of whole numbers or bools.
            ValueError: the mask does not have two axes, an entry has padding inside of its prompt, or there are
                more queries than tokens.
        """
        if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point():
            raise TypeError(
                f"'attention_mask' must be a tensor of whole numbers or bools: {shown(attention_mask)}"
            )
        if attention_mask.ndim != 2 or 0 in attention_mask.shape:
            raise ValueError(
                f"'attention_mask' must have the shape [B, N]: {shown(attention_mask)}. "
                "Give the mask of tokens, not of pairs."
            )
        B, N = attention_mask.shape
        M = N if queries is None else whole(queries)
        count.check(queries=M)
        if M > N:
            raise ValueError(
                f"'queries' must be at most the tokens of the mask ({N}): {M}. Give the mask of all keys."
            )
        real = (attention_mask != 0).to(torch.uint8)
        first, last = real.argmax(1), N - 1 - real.flip(1).argmax(1)
        spans = []
        for entry, (start, end, tokens) in enumerate(torch.stack((first, last + 1, real.sum(1)), 1).tolist()):
            if tokens and end - start != tokens:
                raise ValueError(
                    f"'attention_mask' must have its padding before or behind each prompt: entry {entry} has some "
                    f"inside. Its prompt lies between {start} and {end} but has {tokens} tokens."
                )
            first_query = max(start, N - M)
            own = max(0, end - first_query) if tokens else 0
            spans.append(Span(entry, first_query - (N - M) if own else 0, own, start, tokens))
        return cls(spans, batch=B, queries=M, keys=N, remaining=remaining)

    def parts(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> list[tuple[Tensor, Tensor, Tensor, AttentionSpec] | None]:
        """Views of q, k, v, and the spec, of every sequence. None for one without queries or keys.

        Raises:
            ValueError: q and k have other sizes, or attention is causal and a sequence has more queries than keys.
                Or the call has a number of `remaining` tokens itself.
        """
        self.check_fits(q.shape[0], q.shape[2], k.shape[2], causal=spec.causal)
        if spec.remaining:
            raise ValueError(
                f"'remaining' must be 0 with 'sequences': {spec.remaining}. Give a number for each prompt, "
                "Sequences(..., remaining=[...])."
            )
        return [
            (span.rows(q), span.columns(k), span.columns(v), spec.with_remaining(more))
            if span.queries and span.keys
            else None
            for span, more in zip(self.spans, self.remaining or [0] * len(self.spans), strict=True)
        ]

    def check_fits(self, batch: int, queries: int, keys: int, *, causal: bool) -> None:
        """Refuse sequences that do not lie in tensors of these sizes.

        Raises:
            ValueError: they do not, or attention is causal and a sequence has more queries than keys.
        """
        if (self.batch, self.queries, self.keys) != (batch, queries, keys):
            raise ValueError(
                f"the sequences lie in {self.batch} entries of a batch with {self.queries} queries and "
                f"{self.keys} keys, but q and k have {batch}, {queries} and {keys}. The lengths of packed "
                "sequences must sum to the tokens of q and k."
            )
        for i, span in enumerate(self.spans):
            if causal and span.queries > span.keys:
                raise ValueError(
                    f"causal attention needs at least as many keys as queries: sequence {i} has {span.queries} "
                    f"queries and {span.keys} keys. Pass the cached keys too."
                )


# An input of compiled graphs: no graph is specialised on the numbers or on how many sequences there are.
opaque_object(Sequences)


def _steps(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """The differences of sums that begin with 0 and do not fall."""
    sums = numbers_on_host(name, values)
    steps = [after - before for before, after in pairwise(sums)]
    if sums[:1] != [0] or min(steps, default=0) < 0:
        raise ValueError(f"'{name}' must begin with 0 and never fall: {shown(sums)}. Give cumulative lengths.")
    return steps

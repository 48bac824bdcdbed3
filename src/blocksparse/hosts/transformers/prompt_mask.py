"""Where prompts lie, as masks and the arguments of a model say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any, final

import torch
from attrs import define, evolve, field
from torch import Tensor
from transformers import GenerationMixin
from transformers.masking_utils import sdpa_mask

from blocksparse.batch.sequences import Sequences, Span
from blocksparse.launch.torch_private import tree_map


@final
@define(eq=False)  # torch.compile cannot create frozen instances
class PromptMask:
    """Which of N keys each of M queries sees, `[B, 1, M, N]` bool.

    transformers hands it from the function that makes masks to the function that attends, as it does any mask. No
    other state is needed in between, so threads may share a model and calls may nest. The attention function of
    this library reads its fields, so no memory is taken for a mask. Any other operation on this object makes the
    mask and works on that tensor: of bools, as sdpa gets it, or of `numbers`, as the model's eager function would.

    Without `sequences` and `request` the queries are the last M of `seen` tokens: query `i` sees the keys up to
    `seen - M + i`. With `sequences` this holds in each of them, and with a `window` a query sees at most so many
    keys, the last of these. Padding behind a prompt sees it, as it would see what came before.
    """

    shape: tuple[int, ...]
    seen: int
    device: torch.device
    sequences: Sequences | None = None
    request: Mapping[str, Any] | None = None  # what transformers asked for, if this is neither of the two
    tensor: Tensor | None = None  # the mask, once it is made
    window: int | None = None  # how many keys a query sees at most
    dropped: int = 0  # keys before the first, which a cache of so many dropped
    numbers: torch.dtype | None = None  # of the logits, if a model's own code may add the mask to them
    ndim = 4

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers or torch.bool

    def given(self) -> Tensor:
        """The mask as the model's own code expects it."""
        return self.made() if self.numbers is None else as_numbers(self.made(), self.numbers)

    def made(self) -> Tensor:
        """The mask as a tensor, which all layers share."""
        if self.tensor is None:
            self.tensor = self.rows(0, self.shape[2]).expand(self.shape)
        return self.tensor

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> Tensor:
        """The rows of the queries from `start` to `stop`, `[B|1, 1, stop - start, N]`, or some columns of them."""
        if self.request is not None:
            offset = self.request.get("q_offset", 0) + start
            rows: Tensor = sdpa_mask(
                **{
                    **self.request,
                    "q_offset": offset,
                    "q_length": stop - start,
                    "allow_is_causal_skip": False,  # a None would mean another mask for some of the rows
                }
            )
            return rows[..., columns].to(self.device)
        _, _, M, N = self.shape
        key = torch.arange(N, device=self.device)[columns]
        if self.sequences is None:
            last = torch.arange(start, stop, device=self.device) + (self.seen - M)
            return self._within(key, last.unsqueeze(-1))[None, None]
        first, last = (x[:, start:stop, None] for x in self._queries(self.sequences))
        return ((key >= first) & self._within(key, last)).unsqueeze(1)

    def columns(self, start: int, stop: int) -> slice:
        """Keys outside of which the queries from `start` to `stop` see none, as far as the window alone says."""
        if self.window is None or self.sequences is not None or self.request is not None:
            return slice(None)
        offset = self.seen - self.shape[2]
        return slice(max(0, offset + start - self.window + 1), offset + stop)

    def _within(self, key: Tensor, last: Tensor) -> Tensor:
        """Whether keys are seen if the key at `last` is a query's own."""
        return key <= last if self.window is None else (key <= last) & (key > last - self.window)

    def _queries(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The first key and the last one that each query sees, `[B, M]` each; of no sequence it sees none."""
        B, _, M, _ = self.shape
        first, last = torch.full((2, B, M), -1, device="cpu")
        first += 1
        for entry, query, queries, key, keys in sequences.spans:
            first[entry, query : query + queries] = key
            last[entry, query : query + queries] = torch.arange(key + keys - queries, key + keys, device="cpu")
        for span in padded_behind(sequences):
            begin = span.first_query + span.queries
            first[span.entry, begin:] = span.first_key
            if self.window is not None:
                position = torch.arange(self.seen - M + begin, self.seen, device="cpu")
                first[span.entry, begin:].clamp_min_(position - self.window + 1)
            last[span.entry, begin:] = span.first_key + span.keys - 1
        return first.to(self.device), last.to(self.device)

    def contiguous(self) -> PromptMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> PromptMask | Tensor:
        """As `Tensor.to`. A move to another device, which models on several devices make, needs no tensor yet."""
        moved = torch.zeros((), dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if moved.dtype == self.dtype:
            return evolve(self, device=moved.device, tensor=None)
        return self.given().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            raise TypeError(f"the mask of prompts cannot be changed in place. Clone it before {name}().")
        return getattr(self.given(), name)

    def __getitem__(self, index: Any) -> PromptMask | Tensor:
        """Index the mask. The last queries with all of their keys, which Gemma 4 asks for, need no tensor yet."""
        start, last = self._last_rows(index), self.sequences is None and self.request is None
        if start == 0:
            return self
        if start is not None and last:
            return evolve(self, shape=(*self.shape[:2], self.shape[2] - start, self.shape[3]), tensor=None)
        return self.given()[index]

    def _last_rows(self, index: Any) -> int | None:
        """`start` of an index that takes the last rows, `[:, :, start:, :]`; None for every other index."""
        if not (isinstance(index, tuple) and len(index) == 4 and all(isinstance(x, slice) for x in index)):
            return None
        spans = [part.indices(size) for part, size in zip(index, self.shape, strict=True)]
        start = spans[2][0]
        wanted = [(start if dim == 2 else 0, size, 1) for dim, size in enumerate(self.shape)]
        return start if spans == wanted and start < self.shape[2] else None

    def __invert__(self) -> Tensor:
        return ~self.given()

    def __and__(self, other: Tensor | bool) -> Tensor:
        return torch.bitwise_and(self.given(), other)

    def __or__(self, other: Tensor | bool) -> Tensor:
        return torch.bitwise_or(self.given(), other)

    def __eq__(self, other: object) -> Any:
        return self.given() == other

    def __ne__(self, other: object) -> Any:
        return self.given() != other

    __hash__ = object.__hash__
    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        added = func.__name__.strip("_") in ("add", "radd", "iadd")
        bools = any(isinstance(x, PromptMask) and x.numbers is None for x in args)
        if added and bools and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            raise ValueError(
                "a part of this model adds its mask to numbers, and the masks of a pipeline are bools: the model "
                "cannot run while a pipeline is attached. Call detach() first."
            )
        return func(*tree_map(_given, args), **tree_map(_given, kwargs or {}))


def _given(x: Any) -> Any:
    return x.given() if isinstance(x, PromptMask) else x


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to logits in place of a mask of bools."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def padded_behind(sequences: Sequences) -> list[Span]:
    """The prompts that stand alone in their entry of the batch, and end before its last key."""
    of_entry = {span.entry: span for span in sequences.spans}
    if len(of_entry) < len(sequences.spans):  # packed
        return []
    return [span for span in of_entry.values() if 0 < span.keys < sequences.keys - span.first_key]


@final
class KnownPrompt(local):
    """The length of the prompt that a thread prefills, padding included; None if unknown."""

    def __init__(self) -> None:
        self.tokens: int | None = None

    @contextmanager
    def of(self, tokens: int | None) -> Iterator[None]:
        """A context in which a prompt of so many tokens is read."""
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before

    def after(self, end: int) -> int:
        """Number of tokens of the prompt from position `end` on."""
        return 0 if self.tokens is None else max(self.tokens - end, 0)


def going_on(sequences: Sequences, remaining: int) -> Sequences:
    """The same prompts, where those that reach the last key continue for so many tokens."""
    last = sequences.keys
    return evolve(
        sequences, remaining=[remaining if span.first_key + span.keys == last else 0 for span in sequences.spans]
    )


@final
@define(eq=False)
class PrefillInPlace:
    """Stands in for `GenerationMixin._prefill`, and tells how long the prompt is that it reads in chunks.

    transformers says so nowhere else: a model gets each chunk with no more than the mask up to its end. Calls of
    other models, and prompts that are not read in chunks, go to the method that was there before.
    """

    modules: frozenset[int]
    prompt: KnownPrompt
    before: Callable[..., Any]
    ended: bool = False
    method: Any = field(init=False)

    @classmethod
    def put(cls, modules: frozenset[int], prompt: KnownPrompt) -> PrefillInPlace:
        """Take the place of the method."""
        before = GenerationMixin._prefill
        self = cls(modules, prompt, before)

        def _prefill(
            model: Any, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *more: Any, **named: Any
        ) -> Any:
            tokens = None if self.ended else self._tokens(model, input_ids, generation_config, model_kwargs)
            with prompt.of(prompt.tokens if tokens is None else tokens):
                return before(model, input_ids, generation_config, model_kwargs, *more, **named)

        _prefill.place = self  # type: ignore[attr-defined]
        self.method = _prefill
        GenerationMixin._prefill = _prefill
        return self

    def _tokens(self, model: Any, input_ids: Tensor, generation_config: Any, model_kwargs: Any) -> int | None:
        """The length of a prompt that is read in chunks, what is in the cache included."""
        if id(model) not in self.modules or getattr(generation_config, "prefill_chunk_size", None) is None:
            return None
        mask = model_kwargs.get("attention_mask")
        if isinstance(mask, Tensor):
            return int(mask.shape[1]) if mask.ndim == 2 else None
        # A mask of ones is dropped, and its length kept.
        return int(getattr(generation_config, "_mask_length", input_ids.shape[1]))

    def end(self) -> None:
        """Give the place back, unless another attachment has taken it since; that one then gives it back."""
        self.ended = True
        top = GenerationMixin._prefill
        while isinstance(place := getattr(top, "place", None), PrefillInPlace) and place.ended:
            top = place.before
        GenerationMixin._prefill = top

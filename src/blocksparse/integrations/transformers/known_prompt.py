"""How long a prompt is that a model reads in chunks: told by `generate`, or by the code that makes the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, final

from attrs import define, evolve, field
from torch import Tensor
from transformers import GenerationMixin

from blocksparse.batch.sequences import Sequences


@final
class KnownPrompt(local):
    """The length of the prompt that a thread reads, padding included; None where nobody tells it."""

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
        """How many tokens of the prompt follow those before position `end`."""
        return 0 if self.tokens is None else max(self.tokens - end, 0)


def going_on(sequences: Sequences, remaining: int) -> Sequences:
    """The same prompts, where those that reach the last key go on for so many tokens."""
    last = sequences.keys
    return evolve(
        sequences,
        remaining=[remaining if span.first_key + span.keys == last else 0 for span in sequences.spans],
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
    def put(cls, modules: frozenset[int], prompt: KnownPrompt) -> PrefillInPlace | None:
        """Take the place of the method; None where this version of transformers has none."""
        before = getattr(GenerationMixin, "_prefill", None)
        if before is None:
            return None
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

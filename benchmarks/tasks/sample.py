"""`Sample` is one prompt with what must be found in the answer; `Haystack` fills prompts up to an exact length."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, final

from attrs import field, frozen


@final
@frozen(eq=False)
class Sample:
    """One prompt of a task."""

    ids: list[int]
    expected: tuple[str, ...]
    new_tokens: int  # that the answer may take

    def score(self, reply: str) -> float:
        """The share of the expected strings that the reply contains in any case (RULER's string match)."""
        reply = reply.lower()
        return sum(text.lower() in reply for text in self.expected) / len(self.expected)


@final
@frozen(eq=False)
class Haystack:
    """A text to hide facts in, as tokens, and its words."""

    tokenizer: Any
    text: str
    ids: list[int] = field(init=False)
    words: list[str] = field(init=False)  # 5 to 9 letters, each once, in order of the alphabet

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "ids", self.encode(self.text))
        object.__setattr__(self, "words", sorted(set(re.findall(r"\b[a-z]{5,9}\b", self.text))))

    def encode(self, text: str) -> list[int]:
        """Tokens without any that mark a start or an end."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(
        self, draw: random.Random, tokens: int, facts: Sequence[str], question: str, lead: str = ""
    ) -> list[int]:
        """Exactly `tokens` tokens: `lead`, a window of the text with the facts in it, in order, then the question.

        Raises:
            ValueError: they do not fit, or the text is too short.
        """
        start, end = self.tokenizer.encode("") + self.encode(lead), self.encode("\n\n" + question)
        needles = [self.encode(f"\n\n{fact}\n\n") for fact in facts]
        room = tokens - len(start) - len(end) - sum(map(len, needles))
        if not 0 <= room <= len(self.ids):
            raise ValueError(
                f"a prompt of {tokens} tokens needs {room} tokens of text, and there are {len(self.ids)}"
            )
        begin = draw.randrange(len(self.ids) - room + 1)
        window = self.ids[begin : begin + room]
        places = sorted(draw.randrange(room + 1) for _ in needles)
        ids, at = list(start), 0
        for place, needle in zip(places, needles, strict=True):
            ids += window[at:place] + needle
            at = place
        return ids + window[at:] + end

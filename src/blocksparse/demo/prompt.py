"""The prompt: a text with a fact planted in it, and a question about the fact."""

from __future__ import annotations

import random
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import UserError

_CITIES = ("Berlin", "Cairo", "Dublin", "Lima", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Tokyo", "Vienna")


@final
@frozen(eq=False)
class Prompt:
    """Tokens to read, and what they ask for."""

    ids: Tensor  # [1, N] int64
    is_text: Tensor  # [N] bool, the tokens that come from the text: perplexity is over these
    needle: str
    question: str
    answer: str
    needle_at: int  # token at which the needle starts

    def is_answered_by(self, reply: str) -> bool:
        """Whether the reply, without white space around it, begins with the answer."""
        return reply.startswith(self.answer)


def build(tokenizer: Any, text: str, *, tokens: int, depth: float, seed: int = 0) -> Prompt:
    """A prompt of exactly `tokens` tokens: the start of `text`, the needle at `depth` in it, the question.

    Args:
        depth: share of the text before the needle, in [0, 1]; the needle goes to the paragraph end before it.
        seed: chooses the city and the number of the needle.

    Raises:
        UserError: the text is too short for that many tokens, or `tokens` leaves no room for it.
    """
    choose = random.Random(seed)
    city, answer = choose.choice(_CITIES), str(choose.randrange(10_000, 100_000))
    needle = f"The magic number for {city} is {answer}."
    question = f"Question: What is the magic number for {city}?\nAnswer: The magic number for {city} is"

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(part, add_special_tokens=False)
        return ids

    start_ids: list[int] = tokenizer.encode("")  # what the model expects at the start of every text, if anything
    needle_ids, question_ids = encode(needle + "\n\n"), encode("\n\n" + question)
    room = tokens - len(start_ids) - len(needle_ids) - len(question_ids)
    if room < 1:
        raise UserError(f"'--tokens' must be over {tokens - room}, the length of fact and question: {tokens}")
    # Ten characters a token is more than any prose needs, so this is the same start as of the whole text.
    text_ids = encode(text[: 10 * room])[:room]
    if len(text_ids) < room:
        raise UserError(f"the text has {len(text_ids)} tokens, and {room} are needed: choose a smaller '--tokens'")

    place = round(depth * room)
    while 0 < place < room and "\n" not in tokenizer.decode(text_ids[place - 1]):
        place -= 1
    parts = (  # tokens, and whether they come from the text
        (start_ids, False),
        (text_ids[:place], True),
        (needle_ids, False),
        (text_ids[place:], True),
        (question_ids, False),
    )
    ids = torch.tensor([[token for part, _ in parts for token in part]])
    is_text = torch.tensor([comes for part, comes in parts for _ in part])
    return Prompt(ids, is_text, needle, question, answer, len(start_ids) + place)

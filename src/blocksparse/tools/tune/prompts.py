"""The prompts that a plan is tuned and verified on: texts, and answers in them that must not get lost."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.check.validators import a, shown
from blocksparse.presets.named import TuneError

_CITIES = (
    "Athens", "Berlin", "Cairo", "Dublin", "Geneva", "Havana", "Kyoto", "Lima", "Madrid", "Oslo", "Paris",
    "Prague", "Quito", "Rome", "Tokyo", "Vienna",
)  # fmt: skip
LONG = 0.75
"""Prompts with this share of the tokens of the longest one are as long as it."""

_TOKENS_PER_FACT = 256
_FACTS = 4, 12  # at least and at most; of few answers, one that is lost moves the mean by more than a budget


@final
@frozen(eq=False)
class TunePrompt:
    """Tokens to read, and which of them are answers.

    Args:
        ids: `[1, N]` int64, at least 2.
        answers: the tokens from a start up to, not including, a stop, for each answer. None without an answer.

    Raises:
        TuneError: `ids` has another shape or dtype, or an answer is not inside it after two tokens or more.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        a(Tensor).check(ids=self.ids)
        if self.ids.dim() != 2 or len(self.ids) != 1 or self.ids.numel() < 2 or self.ids.dtype != torch.int64:
            raise TuneError(
                f"'ids' must be [1, N] int64 with at least 2 tokens: {shown(self.ids)}. The tokenizer makes them."
            )
        for start, stop in self.answers:
            if not 2 <= start < stop <= self.ids.shape[1]:
                raise TuneError(
                    f"an answer must lie between token 2 and the end of its prompt, {self.ids.shape[1]}: "
                    f"{start} to {stop}"
                )

    def text_at(self, positions: int) -> Tensor:
        """Positions spread evenly over the tokens before the first answer, `[at most positions]` int64."""
        stop = min((start for start, _ in self.answers), default=self.ids.shape[1]) - 1
        return torch.linspace(0, stop - 1, min(positions, stop), dtype=torch.float64).round().long()

    def answers_at(self) -> Tensor:
        """Positions `[tokens]` int64 at which an answer's tokens are predicted."""
        return torch.tensor([i - 1 for start, stop in self.answers for i in range(start, stop)], dtype=torch.long)


def by_length(prompts: Sequence[TunePrompt]) -> dict[int, list[int]]:
    """The numbers of prompts of about one length, by the tokens of the longest of them; the shortest first.

    Prompts with at least three quarters of the tokens of the longest one belong together, then those with at least
    three eighths, and so on.
    """
    tokens = [prompt.ids.shape[1] for prompt in prompts]
    groups: dict[int, list[int]] = {}
    for number, each in enumerate(tokens):
        halvings = max(0, math.ceil(math.log2(LONG * max(tokens) / each)))
        groups.setdefault(halvings, []).append(number)
    return {
        max(tokens[i] for i in groups[halvings]): groups[halvings] for halvings in sorted(groups, reverse=True)
    }


def hash_of(prompts: Sequence[TunePrompt]) -> str:
    """A hash of the tokens and answers of prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.ids.flatten().tolist(), prompt.answers]).encode())
    return digest.hexdigest()


def prompts_from_text(tokenizer: Any, text: str, *, tokens: int, count: int, seed: int = 0) -> list[TunePrompt]:
    """`count` windows of a text, of exactly `tokens` tokens each, with planted facts that the end asks for.

    There is a fact for every 256 tokens, but at least 4 and at most 12.

    Raises:
        TuneError: the text is too short for that many windows, or `tokens` leaves no room for text.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    prompts = []
    for number in range(count):
        # Windows take equal shares of the text, so that tuned and held ones do not overlap.
        begin, end = (len(ids) * part // count for part in (number, number + 1))
        prompts.append(_with_facts(tokenizer, ids[begin:end], tokens, random.Random(f"{seed}-{number}")))
    return prompts


def _with_facts(tokenizer: Any, ids: list[int], tokens: int, choose: random.Random) -> TunePrompt:
    def encode(part: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(part, add_special_tokens=False)
        return encoded

    few, many = _FACTS
    count = min(max(tokens // _TOKENS_PER_FACT, few), many)
    start: list[int] = tokenizer.encode("")  # what the model expects at the start of every text, if anything
    facts = [(city, str(choose.randrange(10_000, 100_000))) for city in choose.sample(_CITIES, count)]
    needles = [encode(f"\n\nThe magic number for {city} is {number}.\n\n") for city, number in facts]
    questions: list[int] = []
    answers: list[tuple[int, int]] = []
    for city, number in choose.sample(facts, count):
        questions += encode(
            f"\n\nQuestion: What is the magic number for {city}?\nAnswer: The magic number for {city} is"
        )
        answer = encode(f" {number}")
        answers.append((len(questions), len(questions) + len(answer)))
        questions += answer
    room = tokens - len(start) - len(questions) - sum(map(len, needles))
    if room < count:
        raise TuneError(
            f"'tokens' must be at least {tokens - room + count}, what facts and questions take: {tokens}. "
            "Raise it."
        )
    if len(ids) < room:
        raise TuneError(
            f"the text has {len(ids)} tokens for each prompt, and {room} are needed. Give a longer text, or ask "
            "for fewer or shorter prompts."
        )
    places = sorted(choose.randrange(room) for _ in needles)
    read, at = list(start), 0
    for place, needle in zip(places, needles, strict=True):
        read += ids[at:place] + needle
        at = place
    read += ids[at:room]
    offset = len(read)
    return TunePrompt(
        torch.tensor([read + questions]), tuple((offset + begin, offset + end) for begin, end in answers)
    )


def prompts_from_file(tokenizer: Any, path: Path) -> list[TunePrompt]:
    """One prompt for each line of a file, as JSON: `{"prompt": "...", "answer": "..."}`; "answer" may be left out.

    Raises:
        TuneError: the file cannot be read, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(f"the prompts must be a readable UTF-8 file: {path}: {error}. Save it as one.") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            found = None
        known = isinstance(found, dict) and {"prompt"} <= set(found) <= {"prompt", "answer"}
        if not known or not all(isinstance(part, str) and part for part in found.values()):
            raise TuneError(
                f'{path}, line {number}, must be JSON with a text "prompt", and "answer" if there is one, '
                f'as in {{"prompt": "2 + 2 =", "answer": " 4"}}: {shown(line)}'
            )
        ids = tokenizer.encode(found["prompt"])
        answer = tokenizer.encode(found["answer"], add_special_tokens=False) if "answer" in found else []
        if "answer" in found and not answer:
            raise TuneError(
                f"{path}, line {number}, must have an answer of at least 1 token: {shown(line)}. Leave it out."
            )
        spans = ((len(ids), len(ids) + len(answer)),) if answer else ()
        if len(ids) < 2:
            raise TuneError(
                f"{path}, line {number}, must have a prompt of at least 2 tokens: {shown(line)}. Remove it."
            )
        prompts.append(TunePrompt(torch.tensor([ids + answer]), spans))
    return prompts

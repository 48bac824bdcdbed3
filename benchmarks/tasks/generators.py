"""The tasks: retrieval, variable tracking, and counting words. Each makes a sample from a seed and a length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from benchmarks.tasks.sample import Haystack, Sample

Generator = Callable[[Haystack, random.Random, int], Sample]

CITIES = (
    "Athens", "Berlin", "Cairo", "Dublin", "Geneva", "Havana", "Kyoto", "Lima", "Madrid", "Oslo", "Paris",
    "Prague", "Quito", "Rome", "Tokyo", "Vienna",
)  # fmt: skip


def some_number(draw: random.Random, digits: int = 5) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def _asked(
    haystack: Haystack, draw: random.Random, tokens: int, city: str, number: str, facts: list[str]
) -> Sample:
    draw.shuffle(facts)
    question = f"Question: What is the magic number for {city}?\nAnswer: The magic number for {city} is"
    return Sample(haystack.prompt(draw, tokens, facts, question), (number,), 8)


def single(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """One fact, which is asked for."""
    city, number = draw.choice(CITIES), some_number(draw)
    return _asked(haystack, draw, tokens, city, number, [f"The magic number for {city} is {number}."])


def several_keys(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """The same of four cities; one is asked for."""
    facts = {city: some_number(draw) for city in draw.sample(CITIES, 4)}
    city = draw.choice(list(facts))
    said = [f"The magic number for {name} is {number}." for name, number in facts.items()]
    return _asked(haystack, draw, tokens, city, facts[city], said)


def distractors(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Four numbers of one city under different names, and one of another city; the magic one is asked for."""
    city, other = draw.sample(CITIES, 2)
    numbers = [some_number(draw) for _ in range(5)]
    said = [
        f"The {kind} number for {city} is {number}."
        for kind, number in zip(("magic", "house", "winning", "license"), numbers, strict=False)
    ]
    said.append(f"The magic number for {other} is {numbers[4]}.")
    return _asked(haystack, draw, tokens, city, numbers[0], said)


def several_values(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Three numbers of one city, all of which are asked for."""
    city, numbers = draw.choice(CITIES), [some_number(draw) for _ in range(3)]
    said = [f"One of the magic numbers for {city} is {number}." for number in numbers]
    question = (
        f"Question: What are all the magic numbers for {city} that the text mentions?\n"
        f"Answer: The three magic numbers for {city} are"
    )
    return Sample(haystack.prompt(draw, tokens, said, question), tuple(numbers), 32)


def tracking(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """A value that is handed from variable to variable; the names of all that have it are asked for."""
    names = ["".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(6)]
    value, other = some_number(draw), some_number(draw)
    chain, aside = names[:3], names[3:]
    said = [f"VAR {chain[0]} = {value}"] + [f"VAR {new} = VAR {old}" for old, new in pairwise(chain)]
    wrong = [f"VAR {aside[0]} = {other}"] + [f"VAR {new} = VAR {old}" for old, new in pairwise(aside)]
    facts = _merged(draw, said, wrong)  # each chain in its order
    question = (
        f"Question: Which variables in the text have the value {value}?\n"
        f"Answer: The three variables that have the value {value} are VAR"
    )
    return Sample(haystack.prompt(draw, tokens, facts, question), tuple(chain), 32)


def common_words(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """A numbered list of words, five of which are far commoner; they are asked for."""
    words = draw.sample(haystack.words, 5)
    return _counting(
        haystack, draw, tokens, words,
        lambda room: [*words * (room // 30), *draw.choices(haystack.words, k=room // 6)],
        "Question: What are the five most common words in the list?\nAnswer: The five most common words are:",
    )  # fmt: skip


def frequent_words(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Made-up words whose frequencies fall by a power of their rank; the first three are asked for."""
    words = ["".join(draw.choices("bcdfghklmnprstvz", k=2) + draw.choices("aeiou", k=2)) for _ in range(60)]

    def many(room: int) -> list[str]:
        weights = [1 / (rank + 1) ** 2 for rank in range(len(words))]
        scale = room / 5 / sum(weights)
        return [word for word, weight in zip(words, weights, strict=True) for _ in range(round(scale * weight))]

    return _counting(
        haystack, draw, tokens, words[:3], many,
        "Question: What are the three most frequent words in the list?\nAnswer: The three most frequent are:",
    )  # fmt: skip


TASKS: dict[str, Generator] = {
    "single": single,
    "several keys": several_keys,
    "several values": several_values,
    "distractors": distractors,
    "tracking": tracking,
    "common words": common_words,
    "frequent words": frequent_words,
}
"""Every task by name."""


def _merged(draw: random.Random, first: list[str], second: list[str]) -> list[str]:
    """Both in their own order."""
    turns = [first] * len(first) + [second] * len(second)
    draw.shuffle(turns)
    taken: Counter[int] = Counter()
    merged = []
    for turn in turns:
        merged.append(turn[taken[id(turn)]])
        taken[id(turn)] += 1
    return merged


def _counting(
    haystack: Haystack,
    draw: random.Random,
    tokens: int,
    expected: list[str],
    make: Callable[[int], list[str]],
    question: str,
) -> Sample:
    """A list of words that fills nearly the whole prompt, after a little text that makes its length exact."""
    words = make(tokens)
    draw.shuffle(words)
    while True:
        text = f"A list of words: {', '.join(words)}.\n\n{question}"
        over = len(haystack.encode(f"\n\n{text}")) + len(haystack.tokenizer.encode("")) - tokens
        if over <= 0 or not words:
            return Sample(haystack.prompt(draw, tokens, (), text), tuple(expected), 40)
        del words[-max(1, over // 10) :]

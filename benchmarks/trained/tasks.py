"""The tasks by name, and the kind of text each hides its facts in: RULER's, and others that servers meet."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.tasks import generators as ruler
from benchmarks.tasks.generators import CITIES, Generator, some_number
from benchmarks.tasks.sample import Haystack, Sample
from benchmarks.trained.texts import Half, chatml, text_of, turns

_NAMES = ("Alice", "Bruno", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Liam")
_TRADES = (
    "baker", "dentist", "pilot", "plumber", "lawyer", "florist", "carpenter", "surgeon", "librarian", "tailor",
    "chemist", "farmer",
)  # fmt: skip
_VERBS = ("load", "merge", "filter", "encode", "resolve", "archive", "validate", "schedule", "rotate", "compact")
_NOUNS = ("invoice", "sensor", "ticket", "voucher", "parcel", "ledger", "voyage", "recipe", "tariff", "beacon")
_CLASSES = {  # made-up names, and words that belong together
    "blik": ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum", "melon"),
    "dax": ("dog", "cat", "horse", "cow", "sheep", "goat", "lion", "tiger", "wolf", "rabbit", "mouse", "bear"),
    "wug": ("red", "blue", "green", "yellow", "purple", "pink", "brown", "black", "white", "grey", "violet"),
    "fep": ("hammer", "saw", "drill", "wrench", "pliers", "chisel", "axe", "shovel", "rake", "file", "knife"),
}


def several_queries(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """The numbers of six cities; those of three are asked for in one question."""
    facts = {city: some_number(draw) for city in draw.sample(CITIES, 6)}
    asked = draw.sample(list(facts), 3)
    said = [f"The magic number for {city} is {value}." for city, value in facts.items()]
    draw.shuffle(said)
    names = f"{asked[0]}, {asked[1]} and {asked[2]}"
    question = (
        f"Question: What are the magic numbers for {names}?\n"
        f"Answer: The magic numbers for {names}, in this order, are"
    )
    return Sample(haystack.prompt(draw, tokens, said, question), tuple(facts[city] for city in asked), 32)


def question_first(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """The question stands before the text, and the end of the prompt does not repeat the city."""
    facts = {city: some_number(draw) for city in draw.sample(CITIES, 4)}
    city = draw.choice(list(facts))
    said = [f"The magic number for {name} is {value}." for name, value in facts.items()]
    draw.shuffle(said)
    lead = f"Read the text and find the magic number for {city}. The text:\n\n"
    question = "End of the text.\nThe magic number that was asked for at the start is"
    return Sample(haystack.prompt(draw, tokens, said, question, lead=lead), (facts[city],), 8)


def planted_facts(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Question answering over planted sentences: who works as what, and where each trade is practised."""
    people, trades, cities = draw.sample(_NAMES, 6), draw.sample(_TRADES, 6), draw.sample(CITIES, 6)
    said = [
        f"{name}, who has worked as a {trade} for many years, now lives in {city}."
        for name, trade, city in zip(people, trades, cities, strict=True)
    ]
    who = draw.randrange(6)
    question = f"Question: In which city does the {trades[who]} live?\nAnswer: The {trades[who]} lives in"
    return Sample(haystack.prompt(draw, tokens, said, question), (cities[who],), 6)


def code_default(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Four functions with a parameter of one name; the default value in one of them is asked for."""
    names = [f"{verb}_{noun}" for verb, noun in zip(draw.sample(_VERBS, 4), draw.sample(_NOUNS, 4), strict=True)]
    values = [some_number(draw, 4) for _ in names]
    said = [
        f"def {name}(source, limit={value}, strict=False):\n"
        f'    """{name.replace("_", " ").capitalize()}, at most limit of them."""\n'
        f"    return [item for item in source if check(item, strict)][:limit]"
        for name, value in zip(names, values, strict=True)
    ]
    which = draw.randrange(4)
    question = (
        f"# Question: what is the default value of the parameter limit of the function {names[which]}?\n"
        f"# Answer: def {names[which]}(source, limit="
    )
    return Sample(haystack.prompt(draw, tokens, said, question), (values[which],), 6)


def code_caller(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Four functions that each call another helper; the one that calls a given helper is asked for."""
    verbs, nouns = draw.sample(_VERBS, 8), draw.sample(_NOUNS, 8)
    callers = [f"{verbs[i]}_{nouns[i]}" for i in range(4)]
    helpers = [f"_{verbs[4 + i]}_{nouns[4 + i]}" for i in range(4)]
    said = [
        f"def {caller}(items, options):\n"
        f"    prepared = sorted(items, key=options.key)\n"
        f"    return {helper}(prepared, options)"
        for caller, helper in zip(callers, helpers, strict=True)
    ]
    which = draw.randrange(4)
    question = (
        f"# Question: which function calls {helpers[which]}(prepared, options)?\n"
        f"# Answer: {helpers[which]} is called by the function"
    )
    return Sample(haystack.prompt(draw, tokens, said, question), (callers[which],), 10)


def many_shot(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
    """Examples of words and made-up names of their classes fill the prompt; another word is asked for."""
    label = draw.choice(list(_CLASSES))
    word = draw.choice(_CLASSES[label])
    known = [(w, name) for name, words in _CLASSES.items() for w in words if w != word]
    question = f"Word: {word}\nClass:"
    end = haystack.encode(question)
    room, lines = tokens - len(haystack.tokenizer.encode("")) - len(end), []
    while True:
        w, name = draw.choice(known)
        more = haystack.encode(f"Word: {w}\nClass: {name}\n\n")
        if len(more) > room:
            break
        room -= len(more)
        lines += more
    # Less than an example is left: a few words of prose make the length exact.
    return Sample([*haystack.tokenizer.encode(""), *haystack.ids[:room], *lines, *end], (label,), 4)


def in_chat(half: Half) -> Generator:
    """A chat; the user tells the codes of four cities somewhere, and the last turn asks for one of them."""

    def make(haystack: Haystack, draw: random.Random, tokens: int) -> Sample:
        facts = {city: some_number(draw) for city in draw.sample(CITIES, 4)}
        city = draw.choice(list(facts))
        start = haystack.encode(chatml("system", "You are a helpful assistant."))
        end = haystack.encode(
            chatml("user", f"What is the door code of our office in {city}, which I told you?")
            + f"<|im_start|>assistant\nThe door code of your office in {city} is"
        )
        told = [
            haystack.encode(
                chatml("user", f"Keep in mind that the door code of our office in {name} is {code}.")
                + chatml("assistant", "I will keep it in mind.")
            )
            for name, code in facts.items()
        ]
        draw.shuffle(told)
        begin, close = haystack.encode("<|im_start|>user\n"), haystack.encode("<|im_end|>\n")
        room = tokens - len(start) - len(end) - sum(map(len, told)) - len(begin) - len(close)
        every, at, middle = turns(half), draw.randrange(len(turns(half))), []
        while True:
            asked, answer = every[at % len(every)]
            turn = haystack.encode(chatml("user", asked) + chatml("assistant", answer))
            if len(turn) > room:
                break
            middle.append(turn)
            room -= len(turn)
            at += 1
        paste = haystack.encode(2 * every[at % len(every)][1])
        filler = (paste * (room // len(paste) + 1))[:room]  # makes the length exact
        for fact in told:
            middle.insert(draw.randrange(len(middle) + 1), fact)
        ids = [*start, *(i for turn in middle for i in turn), *begin, *filler, *close, *end]
        return Sample(ids, (facts[city],), 8)

    return make


def tasks(half: Half) -> dict[str, tuple[str, Generator]]:
    """Every task: the kind of text that is its haystack, and what makes a sample."""
    prose: dict[str, Generator] = {
        **ruler.TASKS,
        "several queries": several_queries,
        "question first": question_first,
        "planted facts": planted_facts,
    }
    return {
        **{name: ("prose", make) for name, make in prose.items()},
        "code: default value": ("code", code_default),
        "code: caller": ("code", code_caller),
        "many-shot classes": ("prose", many_shot),
        "chat": ("chat", in_chat(half)),
    }


def samples(
    tokenizer: object, half: Half, tokens: int, count: int, seed: int, only: Callable[[str], bool] = lambda _: True
) -> dict[str, list[Sample]]:
    """`count` samples of each task of exactly `tokens` tokens; more of them begin with the same ones."""
    stacks: dict[str, Haystack] = {}
    found = {}
    for task, (kind, make) in tasks(half).items():
        if only(task):
            if kind not in stacks:
                # Longer texts than a few prompts take minutes to cut into tokens.
                stacks[kind] = Haystack(tokenizer, text_of(kind, half)[: 5 * max(tokens, 32768) * 2])
            draws = (random.Random(f"{task} {tokens} {half} {seed} {i}") for i in range(count))
            found[task] = [make(stacks[kind], draw, tokens) for draw in draws]
    return found

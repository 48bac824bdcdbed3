"""Four kinds of text that are on any machine with Python: prose, a manual, code and a chat; each in two halves.

Settings are chosen on the half "choose" and reported on the half "report".
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from blocksparse.tools.demo import TEXT

Half = Literal["choose", "report"]
JARGON = Path(__file__).parents[2] / "examples/data/jargon.txt"


def prose() -> tuple[str, str]:
    """A novel, then the Jargon File: each half has a half of both."""
    halves = [_halves(path.read_text(encoding="utf-8"), "\n\n") for path in (TEXT, JARGON)]
    return halves[0][0] + "\n\n" + halves[1][0], halves[0][1] + "\n\n" + halves[1][1]


def manual() -> tuple[str, str]:
    """Python's language reference, as `help()` prints it; what stands in several topics, once."""
    from pydoc_data import topics

    pages = (str(text).strip().split("\n\n") for _, text in sorted(topics.topics.items()))
    return _halves("\n\n".join(dict.fromkeys(part for page in pages for part in page)), "\n\n")


def code() -> tuple[str, str]:
    """Python's standard library; files alternate between the halves."""
    files = [f"# {path.name}\n{source.strip()}\n\n\n" for path, source in _library()]
    return "".join(files[::2]), "".join(files[1::2])


def chat() -> tuple[str, str]:
    """A conversation about the standard library, as `turns` gives it, in ChatML."""
    halves = turns("choose"), turns("report")
    first, second = ("".join(chatml("user", u) + chatml("assistant", a) for u, a in half) for half in halves)
    return first, second


@cache
def turns(half: Half) -> tuple[tuple[str, str], ...]:
    """Questions of a user about functions of the standard library, and their documentation as the answers."""
    every = [
        (f"What does `{name}` of the module `{path.stem}` do?", inspect.cleandoc(said))
        for path, source in _library()
        for name, said in _documented(source)
        if 100 <= len(said) <= 2000
    ]
    # Neighbours are of one module, so a conversation jumps between modules as people do.
    jumping = sorted(every, key=lambda turn: hashlib.sha256(turn[0].encode()).digest())
    return tuple(jumping[half == "report" :: 2])


def chatml(role: str, text: str) -> str:
    """One turn in the format that Qwen and SmolLM2 were trained on."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


KINDS: dict[str, Callable[[], tuple[str, str]]] = {"prose": prose, "manual": manual, "code": code, "chat": chat}
"""The texts by kind: `KINDS[kind]()` is the half to choose on and the half to report on."""


def text_of(kind: str, half: Half) -> str:
    """One half of the text of a kind."""
    return KINDS[kind]()[half == "report"]


def _halves(text: str, border: str) -> tuple[str, str]:
    middle = text.index(border, len(text) // 2)
    return text[:middle], text[middle:].lstrip()


@cache
def _library() -> tuple[tuple[Path, str], ...]:
    """Top-level modules of the standard library of 4 to 120 kB, in order of their names, ASCII only."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        data = path.read_bytes()
        if 4_000 <= len(data) <= 120_000 and data.isascii():
            found.append((path, data.decode()))
    return tuple(found)


def _documented(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
            yield node.name, said

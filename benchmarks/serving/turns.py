"""Engines in processes of their own, and what takes a turn in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

CHUNK = 8192


class Case(NamedTuple):
    """Prompts that arrive at once."""

    prompts: int
    tokens: int
    answer: int = 1
    chunk: int = CHUNK

    def __str__(self) -> str:
        answer = f", {self.answer} tokens of answer" if self.answer > 1 else ""
        return f"{self.prompts} x {self.tokens:,}{answer}, chunks of {self.chunk}"

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.tokens + self.answer

    @classmethod
    def read(cls, text: str) -> Case:
        """Of `16x1000`, `16x1000x64` (64 tokens of answer) or `1x65536@2048` (in chunks)."""
        sizes, _, chunk = text.partition("*")[0].partition("@")
        case = cls(*map(int, sizes.split("x")))
        return case._replace(chunk=int(chunk)) if chunk else case


class Engine:
    """A process of `benchmarks.serving.engine`. What it is told is begun at once; `answer` waits for it."""

    def __init__(self, name: str, job: dict[str, Any], log: Path) -> None:
        self.name, self.job, self.log = name, job, log
        command = [sys.executable, "-m", "benchmarks.serving.engine"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.tell(**job)

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the engine {self.name} failed:\n{self.log.read_text()[-5000:]}")
        return json.loads(line)

    def ask(self, **what: Any) -> Any:
        self.tell(**what)
        return self.answer()

    def said(self) -> list[str]:
        """What this library said in the log."""
        return [line.strip()[:300] for line in self.log.read_text().splitlines() if "blocksparse: " in line]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # with several ranks vLLM waits for workers that wait for it
            os.killpg(self.process.pid, signal.SIGKILL)


class Another:
    """A configuration that an engine takes on before it does anything for it."""

    def __init__(self, name: str, engine: Engine, configuration: dict[str, Any]) -> None:
        self.name, self.engine, self.configuration = name, engine, configuration

    def ask(self, **what: Any) -> Any:
        self.engine.ask(do="become", blocksparse=self.configuration)
        return self.engine.ask(**what)


class Bound:
    """An engine whose layers do not attend, which no method can be faster than. Its answers mean nothing."""

    name = "no attention"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, **what: Any) -> Any:
        self.engine.ask(do="attend", on=False)
        try:
            return self.engine.ask(**what)
        finally:
            self.engine.ask(do="attend", on=True)


Turn = Engine | Another | Bound

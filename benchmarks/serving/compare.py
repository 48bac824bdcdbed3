"""Whether engines answer alike over random mixes of requests, and whether their memory stays level."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.serving.turns import Engine, Turn

LOGPROBS = 2e-3


def mixes(count: int, *, tiny: bool) -> list[dict[str, Any]]:
    """Random requests that arrive in turn and share beginnings; every tenth is a crowd, which fills the cache."""
    found, most = [], 300 if tiny else 14000
    for seed in range(count):
        draw = random.Random(seed)
        crowd = seed % 10 == 9 and not tiny
        lengths = [draw.randint(4400, 4460) for _ in range(31)]
        if not crowd:
            # Many are short, some are long.
            lengths = [int(most ** draw.uniform(0.4, 1.0)) for _ in range(draw.randint(2, 6))]
        found.append(
            {
                "lengths": lengths,
                "arrivals": [0 if crowd else draw.randint(0, 6) for _ in lengths],
                "shared": 0 if crowd else draw.choice((0, most // 20, most // 4)),
                "answer": 120 if crowd else draw.randint(1, 8),
                "chunk": 8192 if crowd else draw.choice((most // 40, most // 7, 8192)),
                "seed": seed,
            }
        )
    return found


def compare(stock: Engine, other: Engine, count: int, *, tiny: bool) -> dict[str, Any]:
    """Whether two engines answer alike, and as near as stock to itself where it cuts prompts into other chunks."""
    itself, its = Differences(), Differences()
    cached = preempted = 0
    for mix in mixes(count, tiny=tiny):
        for engine in (stock, other):
            engine.tell(do="mix", **mix)
        expected, found = stock.answer(), other.answer()
        its.saw(expected["answers"], found["answers"])
        cached, preempted = cached + found["cached"], preempted + found["preempted"]
        halved = stock.ask(do="mix", **(mix | {"chunk": max(mix["chunk"] * 5 // 8, 64)}))
        itself.saw(expected["answers"], halved["answers"])
    same = not its.other and its.worst <= max(1.5 * itself.worst, LOGPROBS)
    counters = {"mixes": count, "cached": cached, "preempted": preempted, "counters": other.ask(do="counters")}
    return {"same": same, "differences": vars(its), "stock from itself": vars(itself)} | counters


class Differences:
    """How alike two engines answered. What follows on different tokens answers another text: not compared."""

    def __init__(self) -> None:
        self.tokens = self.above = 0  # compared; with a logprob that differs by more than 2e-3
        self.ties = self.other = 0  # different tokens: one as likely as the other, or not
        self.worst = self.mean = 0.0  # difference of a logprob among the five best

    def saw(self, every_expected: list[Any], every_found: list[Any]) -> None:
        for expected, found in zip(every_expected, every_found, strict=True):
            for (token, best), (token_too, best_too) in zip(expected, found, strict=True):
                apart = [abs(x - best_too[key]) for key, x in best.items() if key in best_too]
                self.mean = (self.mean * self.tokens + max(apart)) / (self.tokens + 1)
                self.tokens += 1
                self.worst, self.above = max(self.worst, *apart), self.above + (max(apart) > LOGPROBS)
                if token != token_too:
                    tie = best[str(token)] - best.get(str(token_too), -99.0) <= 2 * max(apart)
                    self.ties, self.other = self.ties + tie, self.other + (not tie)
                    break


def soak(engine: Turn, seconds: float, *, tiny: bool) -> Iterator[tuple[float, list[float]]]:
    """Serve random mixes for some time: (seconds, `memory` of the engine) after each ten of them."""
    began, every = time.perf_counter(), mixes(10, tiny=tiny)
    while time.perf_counter() - began < seconds:
        for mix in every:
            mix["seed"] += len(every)  # other prompts of the same lengths
            engine.ask(do="mix", **mix)
        after, (there, taken, here) = round(time.perf_counter() - began, 1), engine.ask(do="memory")
        gpu = f"{there:.3f} GiB of the GPU in use, {taken:.3f} taken"
        print(f"{engine.name}: {gpu}, {here:.3f} of the host, after {after} s", flush=True)
        yield after, [there, taken, here]

"""How far tuning has come, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from attrs import define, field

Report = Callable[[str, float, float | None], None]
"""Gets what is being done, the share of the work that is done, and seconds left, None before that is known."""


@final
@define(eq=False)
class Work:
    """Work in dense readings of a prompt, by phase. Amounts are estimates until a phase begins."""

    report: Report
    todo: dict[str, float]  # by phase, in order
    _done: float = field(default=0.0, init=False)
    _measured: float = field(default=0.0, init=False)  # of that, done now and not taken from the journal
    _seconds: float = field(default=0.0, init=False)
    _last: float = field(factory=time.perf_counter, init=False)

    def did(self, phase: str, amount: float, *, now: bool = True) -> None:
        """An `amount` of a phase is done, `now` or in a run before."""
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        if now:
            self._measured += amount
            self._seconds += seconds
        self._done += amount
        self.todo[phase] = max(0.0, self.todo[phase] - amount)
        left = sum(self.todo.values())
        rate = self._seconds / self._measured if self._measured else None
        self.report(phase, self._done / max(self._done + left, 1e-9), None if rate is None else left * rate)

    def is_over(self, phase: str) -> None:
        """Nothing is left of a phase, whatever was expected."""
        self.todo[phase] = 0.0

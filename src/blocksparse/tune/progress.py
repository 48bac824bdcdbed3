"""How far tuning has come, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from attrs import define, field

Report = Callable[[str, float, float | None], None]
"""Gets what is being done, the share of the work that is done, and seconds left, None before that is known."""
_SAYS_NOTHING = 0.02  # of the work


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
        # A few measurements say nothing yet; the first ones also compile and warm up.
        known = self._measured > _SAYS_NOTHING * (self._measured + left)
        self.report(
            phase,
            self._done / max(self._done + left, 1e-9),
            left * self._seconds / self._measured if known else None,
        )

    def begins(self) -> None:
        """What took time until now was no part of this."""
        self._last = time.perf_counter()

    def is_over(self, phase: str) -> None:
        """Nothing is left of a phase, whatever was expected."""
        self.todo[phase] = 0.0

    def ends(self) -> None:
        """All is done."""
        self.todo.clear()
        self.report("done", 1.0, 0.0)

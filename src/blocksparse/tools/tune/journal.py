"""Every measurement on disk as soon as it is made, and how far tuning has come."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from attrs import define, field

from blocksparse.presets.named import TuneError

Report = Callable[[str, float, float | None], None]
"""Gets what is being done, the share of the work that is done, and seconds left, None before that is known."""
_SAYS_NOTHING = 0.02  # of the work
_MOST = 0.99  # of the work is said to be done until it ends


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
        known = left > 0 and self._measured > _SAYS_NOTHING * (self._measured + left)
        self.report(
            phase,
            min(_MOST, self._done / max(self._done + left, 1e-9)),
            left * self._seconds / self._measured if known else None,
        )

    def begins(self) -> None:
        """Start the clock of a phase."""
        self._last = time.perf_counter()

    def is_over(self, phase: str) -> None:
        """Mark a phase as over, whatever was expected."""
        self.todo[phase] = 0.0

    def ends(self) -> None:
        """All is done."""
        self.todo.clear()
        self.report("done", 1.0, 0.0)


@final
@define(eq=False)
class Journal:
    """Measurements by name, one JSON line each, in a file that only grows."""

    path: Path
    _known: dict[str, Any]

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any]) -> Journal:
        """Go on with the journal at `path`, or begin it.

        Args:
            about: everything that the measurements depend on.
        """
        header = json.loads(json.dumps({"about": about}))  # as it will be read back
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = b""
        except OSError as error:
            raise TuneError(f"the journal cannot be read: {path}: {error}") from None
        # A run that was killed may have left half a line behind.
        whole = found[: found.rfind(b"\n") + 1]
        if not whole:
            if found and not json.dumps(header).encode().startswith(found):
                raise TuneError(f"{path} is not a journal of tuning. Move it away, or give another name.")
            journal = cls(path, {})
            try:
                path.write_bytes(b"")
            except OSError as error:
                raise TuneError(f"the journal cannot be written: {path}: {error}") from None
            journal._append(header)
            return journal
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            known = {line["what"]: line["value"] for line in lines}
            theirs = first["about"]
        except (ValueError, KeyError, TypeError):
            raise TuneError(f"{path} is not a journal of tuning. Move it away, or give another name.") from None
        if theirs != header["about"]:
            changed = ", ".join(sorted(k for k in {*theirs, *about} if theirs.get(k) != header["about"].get(k)))
            raise TuneError(
                f"{path} was begun with other settings ({changed} changed). Remove it to start again, or give "
                "another name."
            )
        if len(whole) < len(found):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        return cls(path, known)

    def knows(self, what: str) -> bool:
        """Whether a measurement was made before."""
        return what in self._known

    def __getitem__(self, what: str) -> Any:
        """The measurement, from this run or an earlier one."""
        return self._known[what]

    def note(self, what: str, value: Any) -> None:
        """Keep a measurement, which must be plain JSON."""
        self._append({"what": what, "value": value})
        self._known[what] = value

    def once(self, what: str, measure: Callable[[], Any]) -> Any:
        """The measurement from before, or else a new one."""
        if what not in self._known:
            self.note(what, measure())
        return self._known[what]

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

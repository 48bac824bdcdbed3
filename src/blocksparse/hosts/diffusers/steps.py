"""Which denoising step a model is in, as far as the model itself can know."""

from __future__ import annotations

from typing import final
from weakref import ref

from attrs import define, field
from torch import Tensor

_Prompts = list[ref[Tensor]]


@final
@define(eq=False)
class StepCounter:
    """Counts denoising steps by the timesteps and the prompts that a model is called with.

    Calls with one timestep, as for the two halves of classifier-free guidance, are one step. A timestep nearer to
    noise than the last one begins another run at step 0. After a run that was interrupted, another one may begin
    nearer to the picture. It is known by its prompt, a tensor that the last run did not have, if this pipeline has
    passed one tensor in several steps. That can be a mistake, as for a half of guidance that begins late and comes
    first. Then the run's own prompts come back, or each step has another prompt. The count goes on, and prompts
    are ignored from there on.

    Three cases are counted wrongly. A run is not noticed if it begins where the last one was stopped, or nearer to
    the picture, with the very same tensor as its prompt. The same holds after a run that was stopped in its first
    step. A prompt that a callback replaces once in the middle begins a run. In an inversion, from picture to
    noise, every step begins one.

    Args:
        rising: whether the model's timesteps rise from noise to picture. Most fall.
    """

    rising: bool = False
    _step: int = 0
    _last: float | None = None
    _prompts: _Prompts = field(factory=list)  # of this run
    _lasting: bool | None = None  # whether prompts tell runs apart; None while it is not known
    _before: tuple[int, _Prompts] | None = None  # the step and the prompts of the run that a prompt ended

    def at(self, timestep: float, prompt: Tensor | None = None) -> int:
        """The step that a call with this timestep belongs to, from 0 on.

        Args:
            prompt: a tensor that the host passes in every step of one run, or of one half of its guidance.
        """
        now, known = -timestep if self.rising else timestep, _holds(self._prompts, prompt)
        if self._last is None or now > self._last:
            self._begin(None)
        elif self._before is not None and _holds(self._before[1], prompt):
            self._go_on(nearer=now < self._last)
        elif now < self._last and self._lasting and prompt is not None and not known:
            if self._before is not None and self._step == 0:  # a run of one step: prompts are made again in each
                self._go_on(nearer=True)
            else:
                self._begin((self._step, self._prompts))
        elif now < self._last:
            self._step += 1
            if known and self._lasting is None:
                self._lasting = True
        if prompt is not None and not _holds(self._prompts, prompt):
            self._prompts = [each for each in self._prompts if each() is not None] + [ref(prompt)]
        self._last = now
        return self._step

    def _go_on(self, *, nearer: bool) -> None:
        """Take note that the run before goes on, and that prompts do not tell runs apart."""
        assert self._before is not None
        self._step += self._before[0] + 1 + nearer
        self._prompts += self._before[1]
        self._lasting, self._before = False, None

    def _begin(self, before: tuple[int, _Prompts] | None) -> None:
        self._step, self._prompts, self._before = 0, [], before


def _holds(prompts: _Prompts, prompt: Tensor | None) -> bool:
    """Whether a tensor is one of these, or a view of one."""
    mine = [x for x in (prompt, None if prompt is None else prompt._base) if x is not None]
    return any(each() is x for each in prompts for x in mine)

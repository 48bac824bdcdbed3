"""Which denoising step a model is in, as far as the model itself can know."""

from __future__ import annotations

from typing import final

from attrs import define


@final
@define(eq=False)
class StepCounter:
    """Counts denoising steps by the timesteps that a model is called with.

    Calls with one timestep, as for the two halves of classifier-free guidance, are one step. A timestep nearer to
    noise than the last one begins another run at step 0, so that each call of a pipeline counts anew, whether the
    last one came to its end or not.

    Args:
        rising: whether the model's timesteps rise from noise to picture; most fall.
    """

    rising: bool = False
    _step: int = 0
    _last: float | None = None

    def at(self, timestep: float) -> int:
        """The step that a call with this timestep belongs to, from 0 on."""
        now = -timestep if self.rising else timestep
        if self._last is None or now > self._last:
            self._step = 0
        elif now < self._last:
            self._step += 1
        self._last = now
        return self._step

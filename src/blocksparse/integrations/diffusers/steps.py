"""Which denoising step a model is in, as far as the model itself can know."""

from __future__ import annotations

from typing import final

from attrs import define


@final
@define(eq=False)
class StepCounter:
    """Counts denoising steps by the timesteps that a model is called with.

    Calls with one timestep, as for the two halves of classifier-free guidance, are one step. A timestep nearer to
    noise than the last one begins another run at step 0. So a call of a pipeline counts anew if it begins nearer
    to noise than the last one ended, as after every one that came to its end. What cannot be told: after a run
    that was interrupted, one that begins at its last timestep or nearer to the picture (image to image, say)
    counts on; and in an inversion, from picture to noise, every step begins a run.

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

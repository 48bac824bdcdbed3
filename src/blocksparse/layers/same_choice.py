"""Layers that attend to what one of them chose in the same forward call (Kascade, arXiv 2512.16391)."""

from __future__ import annotations

from threading import local
from typing import Any, Unpack, final

from attrs import frozen
from torch import Tensor

from blocksparse.layers.head_groups_trace import AnyTrace
from blocksparse.layers.kept_choices import KeptChoices
from blocksparse.layers.schedule import LayerPipeline, Schedule
from blocksparse.pipeline import Pipeline
from blocksparse.spec import Asked


class _ForwardCall(local):
    """The forward call that a thread runs, by number, and what was chosen in it."""

    def __init__(self) -> None:
        self.number = 0
        self.choices = KeptChoices(1)


@final
@frozen(eq=False)
class SameChoice:
    """The pipeline of a layer that takes the choice of `chooser`, a layer that is called before it, or itself.

    Layers with one chooser have one `now`. It is called as a `Pipeline` is, after `begin`.
    """

    pipeline: Pipeline[Any, Any, Any]
    layer: int
    chooser: int
    now: _ForwardCall

    def begin(self) -> None:
        """Take note that a call of this layer begins, of one prompt or of several."""
        if self.layer == self.chooser:
            self.now.number += 1
            self.now.choices.begin(self.now.number)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        choices = self.now.choices
        return choices.attend(self.layer, self.pipeline, q, k, v, chooser=self.chooser, **asked).out

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **asked: Unpack[Asked]) -> AnyTrace:
        """Make the same call, and return every value of it but the scores."""
        kept = self.now.choices.attend(self.layer, self.pipeline, q, k, v, chooser=self.chooser, **asked)
        return self.pipeline.trace(q, k, v, **asked) if kept.trace is None else kept.trace


def shared(schedule: Schedule, layers: int) -> tuple[LayerPipeline | SameChoice | None, ...]:
    """What attends in each layer of a model that has `layers` layers, where some take the choices of others.

    Raises:
        TypeError, ValueError: as of `Schedule.choosers`.
    """
    choosers, found = schedule.choosers(layers), list[LayerPipeline | SameChoice | None](schedule.resolve(layers))
    now = {chooser: _ForwardCall() for layer, chooser in enumerate(choosers) if layer != chooser}
    for layer, (attention, chooser) in enumerate(zip(schedule.resolve(layers), choosers, strict=True)):
        if chooser in now and isinstance(attention, Pipeline):
            found[layer] = SameChoice(attention, layer, chooser, now[chooser])
    return tuple(found)

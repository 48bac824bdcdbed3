"""Reuse of selected blocks, in later steps of a model and in later layers.

Kept         Choices that serve several steps of a model (DFSAttn, arXiv 2605.23445; HASTE).
SameChoice   Layers that attend to what one of them chose in the same forward call (Kascade, arXiv 2512.16391).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count
from threading import local
from typing import Any, NamedTuple, Unpack, cast, final
from weakref import ref

from attrs import define, evolve, field, frozen
from torch import Tensor

from blocksparse.check.validators import size
from blocksparse.inputs import checked
from blocksparse.layers.attention import Attention
from blocksparse.layers.head_groups import AnyTrace
from blocksparse.layers.schedule import Schedule
from blocksparse.pipeline import Pipeline
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import Asked
from blocksparse.values import Choice, Trace

_MOST_CALLS = 8  # of a layer in one step for one prompt, whose choices are kept for later steps


class Kept(NamedTuple):
    """An output `[B, Hq, M, Dv]`, the trace of its call without scores, and the age of its choice in steps.

    Where the call attended densely, there is the reason instead of the latter two.
    """

    out: Tensor
    trace: AnyTrace | None
    age: int = 0
    dense_because: str = ""

    @property
    def mask(self) -> BlockMask | None:
        """The blocks that the output is attention to."""
        return None if self.trace is None else self.trace.mask


@final
@define(eq=False)
class KeptChoices:
    """The choices of a model's layers in one step, reused in the steps after it.

        choices = KeptChoices(every=12)
        for step, latents in enumerate(...):
            choices.begin(step, prompt)
            out = choices.attend(layer, pipeline, q, k, v, causal=False).out

    A choice belongs to the prompt that `begin` named: the tensor itself, not its contents. So both halves of
    classifier-free guidance have separate choices, and a run takes none of another one's prompt. If a layer is
    called more often than once in a step for one prompt, its second call takes what its second call chose.

    A choice is renewed when it is `every` steps old, for another pipeline, for tensors of other sizes, and when
    the steps begin again. The memory kept is a byte per block and head of each mask, and the index maps of an
    order. Nothing is kept of a prompt that is gone, or of a choice that is too old.

    Args:
        every: for how many steps a choice is attended to, the step in which it is made included.
    """

    every: int = field(validator=size)
    _step: int = field(default=0, init=False)
    _prompt: int = field(default=0, init=False)  # the number of the one that calls are for; 0 if it is not told
    _prompts: dict[int, ref[Tensor]] = field(factory=dict, init=False)
    _numbers: Iterator[int] = field(factory=lambda: count(1), init=False)
    _calls: Counter[Hashable] = field(factory=Counter, init=False)
    _forgotten: set[int] = field(factory=set, init=False)
    _kept: dict[tuple[int, int, tuple[Any, ...]], tuple[int, Choice[Any]]] = field(factory=dict, init=False)

    def begin(self, step: int, prompt: Tensor | None = None) -> None:
        """Begin a step, whose calls follow. A step before the last one begins another run.

        Args:
            prompt: a tensor that the host passes in every step of one run, or of one half of its guidance, and in
                no other. If None, the calls of a step are counted instead. A run that begins where the last one
                was stopped, or nearer to the picture, then counts as its continuation.
        """
        if step < self._step:
            self._kept.clear()
        if step != self._step:
            self._calls.clear()
            self._kept = {
                key: kept
                for key, kept in self._kept.items()
                if step - kept[0] < self.every and key[2][0] not in self._forgotten
            }
            self._forgotten.clear()
        self._step, self._prompt = step, 0 if prompt is None else self._number_of(prompt)

    def _number_of(self, prompt: Tensor) -> int:
        for number, known in self._prompts.items():
            if known() is prompt:
                return number
        self._prompts = {number: known for number, known in self._prompts.items() if known() is not None}
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] == 0 or key[0] in self._prompts}
        self._prompts[number := next(self._numbers)] = ref(prompt)
        return number

    def attend(
        self,
        layer: int,
        pipeline: Pipeline[Any, Any, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        chooser: int | None = None,
        **asked: Unpack[Asked],
    ) -> Kept:
        """Attend to the kept choice, or make one.

        Args:
            chooser: the layer whose choice this one takes, if that layer was called before it in this step; the
                layer itself if None. Layers with one chooser share each choice.

        Raises:
            TypeError, ValueError: as in a call of the pipeline.
        """
        given = checked(q, k, v, asked)
        spec = given[3]
        if (reason := pipeline.dense_because(*given)) is not None:
            return Kept(pipeline(q, k, v, **asked), None, dense_because=reason)
        plain = spec if spec.sinks is None else evolve(spec, sinks=None)  # by which no block is chosen
        # The scale as it was asked for, since that of the spec has lost its sign to q.
        chooser = layer if chooser is None else chooser
        call = chooser, pipeline, q.shape, k.shape, q.dtype, q.device, plain, asked.get("scale")
        turn = self._calls[self._prompt, layer, call]
        self._calls[self._prompt, layer, call] += 1
        made, choice = self._kept.get((self._prompt, turn, call), (0, None))
        if choice is None or self._step - made >= self.every:
            made, choice = self._step, pipeline.choose(q, k, v, **asked)
            if turn < _MOST_CALLS or self.every == 1:
                self._kept[self._prompt, turn, call] = made, choice
        if spec.sinks is not None:
            choice = evolve(choice, spec=evolve(choice.spec, sinks=spec.sinks))
        output, unknown = pipeline.attend(q, k, v, choice), cast(Any, None)  # scores, of which choices keep none
        trace: AnyTrace = Trace(*given, choice.mask.grid.permutation, unknown, choice.mask, output)
        return Kept(output.out, trace, self._step - made)

    def forget(self, layer: int, *, chooser: int | None = None) -> None:
        """Let this layer choose again in its next call; or `chooser`, whose choices it takes, in the next step."""
        if chooser is not None and chooser != layer:
            self._forgotten.add(chooser)  # now, this layer would choose for it
        else:
            self._kept = {key: kept for key, kept in self._kept.items() if key[2][0] != layer}


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
        """Begin a call of this layer, of one prompt or of several."""
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


def shared(schedule: Schedule, layers: int) -> tuple[Attention | None, ...]:
    """The attention of each layer of a model with `layers` layers, where some layers reuse the choices of others.

    Raises:
        TypeError, ValueError: as in `Schedule.choosers`.
    """
    choosers, found = schedule.choosers(layers), list[Attention | None](schedule.resolve(layers))
    now = {chooser: _ForwardCall() for layer, chooser in enumerate(choosers) if layer != chooser}
    for layer, (attention, chooser) in enumerate(zip(schedule.resolve(layers), choosers, strict=True)):
        if chooser in now and isinstance(attention, Pipeline):
            found[layer] = SameChoice(attention, layer, chooser, now[chooser])
    return tuple(found)

"""Reuse of selected blocks, in later steps of a model and in later layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from threading import local
from typing import Any, NamedTuple, Unpack, cast, final
from weakref import ref

from attrs import define, evolve, field, setters
from torch import Tensor

from blocksparse.check.validators import size
from blocksparse.grid import hiding
from blocksparse.inputs import checked
from blocksparse.layers.head_groups import AnyPipeline, AnyTrace, Attention
from blocksparse.layers.schedule import Schedule
from blocksparse.pipeline import Pipeline
from blocksparse.spec import AttentionOptions, AttentionSpec
from blocksparse.values import Choice, Trace

_MOST_CALLS = 8  # of a layer in one step for one prompt, whose choices are kept for later steps


class _Key(NamedTuple):
    prompt: int  # its number
    turn: int  # which of the alike calls of a layer in one step
    chooser: int
    call: Hashable


@define(eq=False, slots=False, on_setattr=setters.NO_OP)  # as `threading.local` needs it below
class MaskCache:
    """The choices of a model's layers in one step, reused in the steps after it.

    Source: DFSAttn, arXiv 2605.23445; HASTE.

        cache = MaskCache(steps=12)
        attention = ReusedMask(pipeline, layer, layer, cache)
        for step, latents in enumerate(...):
            cache.begin(step, prompt)
            out = attention(q, k, v, causal=False)

    A choice belongs to the prompt that `begin` named: the tensor itself, not its contents. So both halves of
    classifier-free guidance have separate choices, and a run takes none of another one's prompt. If a layer is
    called more often than once in a step for one prompt, its second call takes what its second call chose.

    A choice is renewed when it is `steps` steps old, for another pipeline, for tensors of other sizes, and when
    the steps begin again. The memory kept is a byte per block and head of each mask, and the index maps of an
    order. Nothing is kept of a prompt that is gone, or of a choice that is too old.

    Args:
        steps: for how many steps a choice is attended to, the step in which it is made included.
    """

    steps: int = field(validator=size)
    step: int = field(default=0, init=False)
    last: int = field(default=-1, init=False)  # the layer that began a call last
    _prompt: int = field(default=0, init=False)  # the number of the one that calls are for; 0 if it is not told
    _prompts: dict[int, ref[Tensor]] = field(factory=dict, init=False)
    _numbers: Iterator[int] = field(factory=lambda: count(1), init=False)
    _calls: Counter[Hashable] = field(factory=Counter, init=False)
    _forgotten: set[int] = field(factory=set, init=False)
    _kept: dict[_Key, tuple[int, Hashable, Choice[Any]]] = field(factory=dict, init=False)

    def begin(self, step: int, prompt: Tensor | None = None) -> None:
        """Begin a step, whose calls follow. A step before the last one begins another run.

        Args:
            prompt: a tensor that the host passes in every step of one run, or of one half of its guidance, and in
                no other. If None, the calls of a step are counted instead. A run that begins where the last one
                was stopped, or nearer to the picture, then counts as its continuation.
        """
        if step < self.step:
            self._kept.clear()
        if step != self.step:
            self._calls.clear()
            self._kept = {
                key: kept
                for key, kept in self._kept.items()
                if step - kept[0] < self.steps and key.chooser not in self._forgotten
            }
            self._forgotten.clear()
        self.step, self._prompt = step, 0 if prompt is None else self._number_of(prompt)

    def _number_of(self, prompt: Tensor) -> int:
        for number, known in self._prompts.items():
            if known() is prompt:
                return number
        self._prompts = {number: known for number, known in self._prompts.items() if known() is not None}
        self._kept = {
            key: kept for key, kept in self._kept.items() if key.prompt == 0 or key.prompt in self._prompts
        }
        self._prompts[number := next(self._numbers)] = ref(prompt)
        return number

    def choice(
        self, layer: int, chooser: int, call: Hashable, asked: Hashable, choose: Callable[[], Choice[Any]]
    ) -> tuple[Choice[Any], int]:
        """The kept choice of a call of `layer`, or a new one, and its age in steps.

        Args:
            call: equal for calls that may share a choice. Layers with one chooser share each of them.
            asked: what else a choice depends on. Where it changes, the chooser chooses again.
        """
        turn = self._calls[self._prompt, layer, chooser, call]
        self._calls[self._prompt, layer, chooser, call] += 1
        key = _Key(self._prompt, turn, chooser, call)
        made, of, choice = self._kept.get(key, (0, None, None))
        if choice is None or self.step - made >= self.steps or (layer == chooser and of != asked):
            made, choice = self.step, choose()
            if turn < _MOST_CALLS or self.steps == 1:
                self._kept[key] = made, asked, choice
        return choice, self.step - made

    def forget(self, layer: int, chooser: int) -> None:
        """Let this layer choose again in its next call; or `chooser`, whose choices it takes, in the next step."""
        if chooser != layer:
            self._forgotten.add(chooser)  # now, this layer would choose for it
        else:
            self._kept = {key: kept for key, kept in self._kept.items() if key.chooser != layer}


@final
class _OfThread(local, MaskCache):
    """A cache of which each thread that runs a model has its own."""


@final
@define(eq=False)
class ReusedMask:
    """The attention of a layer to the choice of `chooser`: itself, or a layer that is called before it in a step.

    It is called like a `Pipeline`. Attention over the chosen blocks is exact. Source: Kascade, arXiv 2512.16391.

    Args:
        cache: one for all layers of a model.
        crossings: tells how many calls of this layer were found to cover too little. When there are more, its
            choice is made again.
    """

    pipeline: AnyPipeline
    layer: int
    chooser: int
    cache: MaskCache
    crossings: Callable[[], int] = int  # 0
    _crossed: int = field(default=0, init=False)

    def begin(self) -> None:
        """Begin a call of this layer, of one prompt or of several.

        A new step begins with the chooser, or with a later layer where the chooser's call is dense.
        """
        if self.layer <= self.cache.last:
            self.cache.begin(self.cache.step + 1)
        self.cache.last = self.layer

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`."""
        trace = self._sparse(q, k, v, options)
        return self.pipeline(q, k, v, **options) if trace is None else trace.output.out

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> AnyTrace:
        """Make the same call, and return every value of it; `scores` is None, since choices keep none."""
        trace = self._sparse(q, k, v, options)
        return self.pipeline.trace(q, k, v, **options) if trace is None else trace

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AnyTrace | None:
        """The trace of the call; None if the pipeline attends densely."""
        if (crossed := self.crossings()) > self._crossed:
            self._crossed = crossed
            self.cache.forget(self.layer, self.chooser)
        given = checked(q, k, v, options)
        spec, scale = given[3], options.get("scale")
        if self.pipeline.dense_because(*given) is not None:
            return None
        # The scale as it was asked for, since that of the spec has lost its sign to q.
        own = spec if scale is None else evolve(spec, scale=scale)
        plain = own if own.sinks is None else evolve(own, sinks=None)  # by which no block is chosen
        call = self.pipeline, len(q), q.shape[2], k.shape[2], q.dtype, q.device, spec.causal, spec.remaining
        choice, age = self.cache.choice(
            self.layer, self.chooser, call, (q.shape, k.shape, plain),
            lambda: self.pipeline.choose(q, k, v, **options),
        )  # fmt: skip
        self._refuse_other_layers(choice, q, k, spec)
        output, unknown = self.pipeline.attend(q, k, v, evolve(choice, spec=own)), cast(Any, None)
        return Trace(*given, choice.mask.grid.permutation, unknown, choice.mask, output, age=age)

    def _refuse_other_layers(self, choice: Choice[Any], q: Tensor, k: Tensor, spec: AttentionSpec) -> None:
        """Refuse the choice of a layer with other heads or with another window."""
        grid = choice.mask.grid
        its = grid.q_heads, grid.kv_heads, choice.head_dim, grid.window
        own = q.shape[1], k.shape[1], q.shape[3], hiding(spec.window, k.shape[2])
        if its != own:
            raise ValueError(
                f"'same_choice' must have layers of equal heads and windows together: (Hq, Hkv, D, window) are "
                f"{its} in layer {self.chooser} and {own} in layer {self.layer}. Group them apart."
            )


def shared(schedule: Schedule, layers: int) -> tuple[Attention | None, ...]:
    """The attention of each of `layers` layers of a model, where some reuse the choices of others."""
    choosers, found = schedule.choosers(layers), list[Attention | None](schedule.resolve(layers))
    caches = {chooser: _OfThread(1) for layer, chooser in enumerate(choosers) if layer != chooser}
    for layer, (attention, chooser) in enumerate(zip(schedule.resolve(layers), choosers, strict=True)):
        if chooser in caches and isinstance(attention, Pipeline):
            found[layer] = ReusedMask(attention, layer, chooser, caches[chooser])
    return tuple(found)

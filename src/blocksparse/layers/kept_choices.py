"""Choices that serve several steps of a model (DFSAttn, arXiv 2605.23445; HASTE)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple, Unpack, final

from attrs import define, field
from torch import Tensor

from blocksparse.attention_spec import Asked
from blocksparse.checks.inputs import checked
from blocksparse.checks.validators import size
from blocksparse.choice import Choice
from blocksparse.pipeline import Pipeline
from blocksparse.selectors.block_mask import BlockMask

_MOST_CALLS = 8  # of a layer in one step whose choices are kept: guidance makes two or three


class Kept(NamedTuple):
    """An output `[B, Hq, M, Dv]`, the blocks that it is attention to, and how many steps ago they were chosen.

    There are no such blocks, and no age, where the call attended densely.
    """

    out: Tensor
    mask: BlockMask | None
    age: int | None


@final
@define(eq=False)
class KeptChoices:
    """What the layers of a model chose in a step, for them to attend to in the steps behind it.

        choices = KeptChoices(every=12)
        for step, latents in enumerate(...):
            choices.begin(step)
            out = choices.attend(layer, pipeline, q, k, v, causal=False).out

    The first call of a layer takes what its first call chose, the second what its second chose, counted from the
    last `begin(step)`; and where that is called again for a step, the second time takes what the second time
    chose. So both halves of classifier-free guidance have choices of their own, whether one `begin` stands before
    both or one before each; with one before each, even where a cache skips layers of one half. A choice is made
    anew when it is `every` steps old, for another pipeline, for tensors of other sizes, and when the steps begin
    again. Kept are a byte per block and head of each mask, and the index maps of an order.

    Args:
        every: for how many steps a choice is attended to, the step in which it is made included.
    """

    every: int = field(validator=size)
    _step: int = field(default=0, init=False)
    _begun: int = field(default=0, init=False)  # how often this step was
    _usual: int = field(default=1, init=False)  # how often the step before it was
    _calls: Counter[Hashable] = field(factory=Counter, init=False)
    _kept: dict[Hashable, tuple[int, Choice[Any]]] = field(factory=dict, init=False)

    def begin(self, step: int) -> None:
        """Take note that calls of this step follow. A step before the last one begins another run.

        So may the same step again: it is the other half of guidance, or a run that begins where the last one was
        stopped. Where a step was begun more often than the step before it, or the first one more often than once,
        nobody can tell, and no later step takes what was chosen until then.
        """
        self._calls.clear()
        if step == self._step:
            self._begun += 1
            return
        if step < self._step or self._begun > self._usual:
            self._kept.clear()
        self._usual = max(self._begun, 1) if step > self._step else 1
        self._step, self._begun = step, 1

    def attend(
        self,
        layer: int,
        pipeline: Pipeline[Any, Any, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        **asked: Unpack[Asked],
    ) -> Kept:
        """Attend to what was chosen, or choose.

        Raises:
            TypeError, ValueError: as of a call of the pipeline.
        """
        given = checked(q, k, v, asked)
        if pipeline.dense_because(*given) is not None:
            return Kept(pipeline(q, k, v, **asked), None, None)
        # The scale as it was asked for, since that of the spec has lost its sign to q.
        call = layer, pipeline, q.shape, k.shape, q.dtype, q.device, given[3], asked.get("scale")
        turn = max(self._begun, 1), self._calls[call]
        self._calls[call] += 1
        made, choice = self._kept.get((turn, call), (0, None))
        if choice is None or self._step - made >= self.every:
            made, choice = self._step, pipeline.choose(q, k, **asked)
            if sum(turn) <= _MOST_CALLS:
                self._kept[turn, call] = made, choice
        return Kept(pipeline.attend(q, k, v, choice).out, choice.mask, self._step - made)

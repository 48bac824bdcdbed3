"""What some models do to logits and to the softmax over them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import final

import torch
from attrs import converters, evolve, field, frozen
from torch import Tensor

from blocksparse.kernels.attention.arguments import LogitChange
from blocksparse.per_head import HeadValues, PerHead, by_head, numbers, over_blocks, per_head, wrong_heads
from blocksparse.validators import Rule, optional


def _as_python(value: float | None) -> float | None:
    """Converter: a real number of another library becomes a `float`; what is none stays, for a rule to refuse."""
    return float(value) if isinstance(value, Real) and type(value) not in (bool, int, float) else value


_softcap = Rule(
    "a number from 1e-30 to 1e30",
    lambda x: isinstance(x, Real) and not isinstance(x, bool),
    lambda x: 1e-30 <= x <= 1e30,  # fp32, in which logits are divided by it, rounds less than 1e-45 to 0
)
_sink = numbers("a number from -1e30 to 1e30", lambda x: x.abs() <= 1e30)


@final
@frozen(eq=False)
class Logits:
    """How a layer changes its logits, exactly: nothing here approximates.

    Args:
        softcap: a logit `x`, after the scale, becomes `softcap * tanh(x / softcap)` (Gemma 2); None caps nothing.
        sinks: one more logit that has no value, and so enters the softmax denominator alone (GPT-OSS); one for
            all query heads or one for each. It is neither scaled nor capped. None is a plain softmax.
    """

    softcap: float | None = field(default=None, converter=_as_python, validator=optional(_softcap))
    sinks: PerHead | None = field(default=None, converter=converters.optional(per_head), validator=optional(_sink))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is changed."""
        return self.softcap is None and self.sinks is None

    def unsupported(self, q: Tensor) -> list[str]:
        """Reasons why these do not fit `q` `[B, Hq, M, D]`."""
        return wrong_heads("sinks", self.sinks, q.shape[1])

    def equals(self, other: Logits) -> bool:
        """Whether `other` changes logits alike."""
        mine, its = self.sinks, other.sinks
        if isinstance(mine, HeadValues) and isinstance(its, HeadValues):
            return self.softcap == other.softcap and torch.equal(mine.values, its.values)
        return self.softcap == other.softcap and type(mine) is type(its) and mine == its

    def of_heads(self, heads: Sequence[int], kv_heads: int) -> Logits:
        """Those of some of the `kv_heads` KV heads of a layer: with the sinks of their query heads.

        Raises:
            ValueError: the sinks are not as many for each KV head.
        """
        if not isinstance(self.sinks, HeadValues):
            return self
        values = self.sinks.values
        if len(values) % kv_heads:
            raise ValueError(f"'sinks' must have as many entries for each of {kv_heads} KV heads: {len(values)}")
        by_kv_head = values.view(kv_heads, -1)
        return evolve(self, sinks=torch.cat([by_kv_head[head] for head in heads]))

    def for_kernel(self, q: Tensor) -> LogitChange:
        """What the portable kernel gets, for `q` `[B, Hq, M, D]`."""
        return LogitChange(self.softcap, None if self.sinks is None else by_head(self.sinks, q))

    def capped(self, logits: Tensor) -> Tensor:
        """The logits after the cap; they are overwritten."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention `out` `[B, Hq, M, Dv]` without sinks and its lse `[B, Hq, M]`, as both are with them.

        A query without a kept key keeps its output of 0, and has the sink as its lse.
        """
        if self.sinks is None:
            return out, lse
        sinks = over_blocks(self.sinks, lse.unsqueeze(3)).squeeze(3).to(lse.dtype)
        share = torch.sigmoid(lse - sinks)  # of the softmax that is not the sink's
        return out * share.unsqueeze(3), torch.logaddexp(lse, sinks)


PLAIN = Logits()

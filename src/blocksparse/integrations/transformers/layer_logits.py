"""The softcap and the attention sinks that a model gives to the attention of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, final
from weakref import ref

import torch
from attrs import define, field
from torch import Tensor

from blocksparse.executors.logits import PLAIN, Logits
from blocksparse.integrations.transformers.last_lengths import same, version

SINKS = ("s_aux", "sinks")
"""The names that models have for attention sinks."""


def sinks_in(kwargs: Mapping[str, Any]) -> Any:
    """What a model gives as attention sinks, or None."""
    return next((kwargs[name] for name in SINKS if kwargs.get(name) is not None), None)


def unread_because(kwargs: Mapping[str, Any], q_heads: int) -> str | None:
    """The reason why these arguments cannot be read as `Logits` for so many query heads, or None."""
    softcap, sinks = kwargs.get("softcap"), sinks_in(kwargs)
    compiling = torch.compiler.is_compiling()  # to read a tensor would break the graph
    if softcap is not None and (compiling or not isinstance(softcap, Real)):
        return "softcap"
    if sinks is not None and (compiling or not isinstance(sinks, Tensor) or sinks.shape != (q_heads,)):
        return "attention sinks"
    return None


@final
@define(eq=False)
class LayerLogits:
    """Makes `Logits` of the arguments of one layer, and keeps them for its next calls.

    To read sinks, the host waits for a GPU. So they are read again only when another tensor comes, or when its
    version says that an op wrote to it.
    """

    _last: tuple[list[tuple[ref[Tensor], int]], Any, Logits] | None = field(default=None, init=False)

    def of(self, kwargs: Mapping[str, Any]) -> Logits:
        """The same object for as long as the softcap and the sinks are the same."""
        softcap, sinks = kwargs.get("softcap"), sinks_in(kwargs)
        if softcap is None and sinks is None:
            return PLAIN
        last, tensors = self._last, () if sinks is None else (sinks,)  # read once: threads may replace it
        if last is not None and last[1] == softcap and same(last[0], tensors):
            return last[2]
        # A sink of -inf is none: to add exp(-1e30) adds nothing.
        values = None if sinks is None else sinks.detach().cpu().double().clamp_min(-1e30)
        logits = Logits(softcap, values)
        self._last = [(ref(x), version(x)) for x in tensors], softcap, logits
        return logits

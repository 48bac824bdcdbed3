"""The softcap and the attention sinks that a model gives to the attention of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, final
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


class _Read(NamedTuple):
    """What was read, and of what."""

    tensors: list[tuple[ref[Tensor], int]]
    at: int  # the address of the sinks
    softcap: Any
    values: Tensor | None
    logits: Logits


@final
@define(eq=False)
class LayerLogits:
    """Makes `Logits` of the arguments of one layer, and keeps them for its next calls.

    To read sinks, the host waits for a GPU. So there they are read again only when another tensor or other memory
    comes, or when its version says that an op wrote to it. On a CPU they are read each time.
    """

    _last: _Read | None = field(default=None, init=False)

    def of(self, kwargs: Mapping[str, Any]) -> Logits:
        """The same object for as long as the softcap and the sinks are the same."""
        softcap, sinks = kwargs.get("softcap"), sinks_in(kwargs)
        if softcap is None and sinks is None:
            return PLAIN
        last, tensors = self._last, () if sinks is None else (sinks,)  # read once: threads may replace it
        at = 0 if sinks is None else sinks.data_ptr()
        known = last is not None and last.softcap == softcap and last.at == at and same(last.tensors, tensors)
        if last is not None and known and (sinks is None or _unwritten(sinks, last)):
            return last.logits
        values = None if sinks is None else _values(sinks)
        logits = Logits(softcap, values)
        self._last = _Read([(ref(x), version(x)) for x in tensors], at, softcap, values, logits)
        return logits


def _values(sinks: Tensor) -> Tensor:
    # A sink of -inf is none: to add exp(-1e30) adds nothing.
    return sinks.detach().cpu().double().clamp_min(-1e30)


def _unwritten(sinks: Tensor, last: _Read) -> bool:
    """Whether sinks on a CPU are what they were, also if something wrote to them of which no version tells."""
    return sinks.device.type != "cpu" or (last.values is not None and torch.equal(_values(sinks), last.values))

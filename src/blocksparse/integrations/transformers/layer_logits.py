"""The softcap and the attention sinks that a model gives to the attention of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

SINKS = ("s_aux", "sinks")
"""The names that models have for attention sinks."""


def sinks_in(kwargs: Mapping[str, Any]) -> Any:
    """What a model gives as attention sinks, or None."""
    return next((kwargs[name] for name in SINKS if kwargs.get(name) is not None), None)


def unread_because(kwargs: Mapping[str, Any], q_heads: int) -> str | None:
    """The reason why these arguments cannot be read for so many query heads, or None."""
    softcap, sinks = kwargs.get("softcap"), sinks_in(kwargs)
    compiling = torch.compiler.is_compiling()  # to read a tensor would break the graph
    if softcap is not None and (compiling or not isinstance(softcap, Real)):
        return "softcap"
    if sinks is not None and (compiling or not isinstance(sinks, Tensor) or sinks.shape != (q_heads,)):
        return "attention sinks"
    return None

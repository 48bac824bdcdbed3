"""A number that may differ by query head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PerHead = float | Tensor
"""One number for all query heads, or a tensor `[Hq]`."""


def per_head(value: float | Sequence[float] | Tensor) -> PerHead:
    """Converter: a sequence becomes a tensor `[Hq]`; numbers and tensors pass."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return torch.tensor(value, dtype=torch.float64)
    return value


def optional_per_head(value: float | Sequence[float] | Tensor | None) -> PerHead | None:
    """Converter: as `per_head`, and None passes."""
    return None if value is None else per_head(value)


def check(rule: str, holds: Callable[[Tensor], Tensor]) -> Callable[[object, Any, PerHead], None]:
    """Validator: the rule must hold for every entry; NaN never passes."""

    def validate(_: object, attribute: Any, value: PerHead) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise TypeError(f"'{attribute.name}' must be a number or a tensor [Hq]: {value!r}")
        entries = torch.as_tensor(value, dtype=torch.float64)
        if entries.ndim > 1 or not bool(holds(entries).all()):
            raise ValueError(f"'{attribute.name}' must be {rule}: {value}")

    return validate


def over_blocks(value: PerHead, scores: Tensor) -> Tensor:
    """The value as float64, broadcast against `scores` `[B, Hq, rows, cols]`.

    Raises:
        ValueError: the tensor does not have one entry per query head.
    """
    if not isinstance(value, Tensor):
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=scores.device)
    if value.ndim == 1 and value.shape[0] != scores.shape[1]:
        raise ValueError(f"a per-head value needs one entry per query head ({scores.shape[1]}): {value.shape[0]}")
    return value.to(scores.device, torch.float64).reshape(1, -1, 1, 1)

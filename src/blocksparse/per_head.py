"""A number that may differ by query head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor


@final
class HeadValues:
    """One number for each query head, `[Hq]`, copied to each device once.

    A copy from the host makes it wait, and a CUDA graph cannot hold one: only the first call on a device makes it.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().clone()  # later writes to the caller's tensor change nothing
        self._copies = {values.device: self.values}

    def on(self, device: torch.device) -> Tensor:
        """The values on a device."""
        if device not in self._copies:
            self._copies[device] = self.values.to(device)
        return self._copies[device]

    def __repr__(self) -> str:
        return repr(self.values.tolist())

    def __reduce__(self) -> tuple[type[HeadValues], tuple[Tensor]]:
        return HeadValues, (self.values,)


PerHead = float | HeadValues
"""One number for all query heads, or one for each."""


def per_head(value: float | Sequence[float] | Tensor | HeadValues) -> PerHead:
    """Converter: a sequence or a tensor becomes `HeadValues`; numbers pass."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = torch.tensor(value, dtype=torch.float64)
    return HeadValues(value) if isinstance(value, Tensor) else value


def optional_per_head(value: float | Sequence[float] | Tensor | HeadValues | None) -> PerHead | None:
    """Converter: as `per_head`, and None passes."""
    return None if value is None else per_head(value)


def check(rule: str, holds: Callable[[Tensor], Tensor]) -> Callable[[object, Any, PerHead], None]:
    """Validator: the rule must hold for every entry; NaN never passes."""

    def validate(_: object, attribute: Any, value: PerHead) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float | HeadValues):
            raise TypeError(f"'{attribute.name}' must be a number or a tensor [Hq]: {value!r}")
        entries = torch.as_tensor(value.values if isinstance(value, HeadValues) else value, dtype=torch.float64)
        if entries.ndim > 1 or not bool(holds(entries).all()):
            raise ValueError(f"'{attribute.name}' must be {rule}: {value}")

    return validate


def over_blocks(value: PerHead, scores: Tensor) -> Tensor:
    """The value as float64, broadcast against `scores` `[B, Hq, rows, cols]`.

    Raises:
        ValueError: there is not one entry per query head.
    """
    if not isinstance(value, HeadValues):
        return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=scores.device)
    entries = value.on(scores.device)
    if entries.ndim == 1 and entries.shape[0] != scores.shape[1]:
        raise ValueError(
            f"a per-head value needs one entry per query head ({scores.shape[1]}): {entries.shape[0]}"
        )
    return entries.to(torch.float64).reshape(1, -1, 1, 1)


def number_or_blocks(value: PerHead, scores: Tensor) -> float | Tensor:
    """`over_blocks`, or the one number for all heads as it is: a kernel takes that without a launch."""
    return over_blocks(value, scores) if isinstance(value, HeadValues) else value


def by_head(value: PerHead | None, q: Tensor) -> Tensor | None:
    """The value as fp32 `[Hq]` on the device of `q` `[B, Hq, M, D]`."""
    if value is None:
        return None
    if not isinstance(value, HeadValues):
        return torch.full((q.shape[1],), value, dtype=torch.float32, device=q.device)
    return value.on(q.device).float().expand(q.shape[1]).contiguous()


def wrong_heads(name: str, value: PerHead | None, heads: int) -> list[str]:
    """Why a value does not fit `heads` query heads; empty where it does."""
    entries = value.values if isinstance(value, HeadValues) else None
    if entries is None or entries.ndim == 0 or len(entries) == heads:
        return []
    return [f"'{name}' has {len(entries)} entries for {heads} query heads"]

"""Ways in which tensors `[B, H, N, D]` may lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_JUNK = float("nan")


def _stored_as(*axes: int) -> Callable[[Tensor], Tensor]:
    """With these axes of the tensor from the outermost to the innermost."""
    back = [axes.index(axis) for axis in range(len(axes))]
    return lambda x: x.permute(axes).contiguous().permute(back)


def _beside_junk(axis: int, size: int) -> Callable[[Tensor], Tensor]:
    """Cut out of a larger tensor."""

    def cut(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[axis] = size
        junk = x.new_full(shape, _JUNK) if x.is_floating_point() else x.new_full(shape, 1)
        return torch.cat((x, junk), dim=axis).narrow(axis, 0, x.shape[axis])

    return cut


def _every_second(axis: int) -> Callable[[Tensor], Tensor]:
    def cut(x: Tensor) -> Tensor:
        doubled = x.repeat_interleave(2, dim=axis)
        odd = torch.arange(1, doubled.shape[axis], 2, device=x.device)
        doubled.index_fill_(axis, odd, _JUNK if x.is_floating_point() else 1)
        return doubled[(slice(None),) * axis + (slice(None, None, 2),)]

    return cut


def _offset(x: Tensor) -> Tensor:
    """One element into its memory."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens before heads": _stored_as(0, 2, 1, 3),
    "tokens before batch": _stored_as(2, 0, 1, 3),
    "head dim not innermost": _stored_as(0, 1, 3, 2),
    "channels last": _stored_as(0, 2, 3, 1),
    "part of the heads": _beside_junk(1, 3),
    "every second head": _every_second(1),
    "every second token": _every_second(2),
    "part of a cache": _beside_junk(2, 5),
    "part of a fused projection": _beside_junk(3, 16),
    "odd rows": _beside_junk(3, 1),
    "one batch entry expanded": lambda x: x[:1].expand(x.shape),
    "one head expanded": lambda x: x[:, :1].expand(x.shape),
    "one token expanded": lambda x: x[:, :, :1].expand(x.shape),
    "offset by one element": _offset,
}

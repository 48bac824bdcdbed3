"""The mask of a chunk of a prompt, which is made only if it is needed as a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from attrs import define
from torch import Tensor
from torch.utils._pytree import tree_map


@final
@define(eq=False)  # torch.compile cannot create frozen instances
class ChunkMask:
    """Which of N keys the last M of `seen` tokens see, `[B, 1, M, N]` bool: query `i` up to key `seen - M + i`.

    transformers hands it from the function that makes masks to the function that attends, as it does any mask. No
    other state is needed in between, so threads may share a model and calls may nest. The attention function of
    this library reads only `seen`, so no memory is taken for a mask. Any other operation on this object makes the
    mask and works on that tensor.
    """

    shape: tuple[int, ...]
    seen: int
    device: torch.device
    dtype = torch.bool
    ndim = 4

    def made(self) -> Tensor:
        """The mask as a tensor."""
        _, _, M, N = self.shape
        mask = torch.ones(M, N, dtype=torch.bool, device=self.device).tril(self.seen - M)
        return mask.expand(self.shape)

    def contiguous(self) -> ChunkMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> ChunkMask | Tensor:
        """As `Tensor.to`. A move to another device, which models on several devices make, needs no tensor yet."""
        probe = torch.zeros((), dtype=torch.bool, device=self.device).to(*args, **kwargs)
        if probe.dtype == torch.bool:
            return ChunkMask(self.shape, self.seen, probe.device)
        return self.made().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            raise TypeError(f"the mask of a chunk cannot be changed in place: clone it before {name}()")
        return getattr(self.made(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.made()[index]

    def __invert__(self) -> Tensor:
        return ~self.made()

    def __and__(self, other: Tensor | bool) -> Tensor:
        return torch.bitwise_and(self.made(), other)

    def __or__(self, other: Tensor | bool) -> Tensor:
        return torch.bitwise_or(self.made(), other)

    def __eq__(self, other: object) -> Any:
        return self.made() == other

    def __ne__(self, other: object) -> Any:
        return self.made() != other

    __hash__ = object.__hash__
    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


def _made(x: Any) -> Any:
    return x.made() if isinstance(x, ChunkMask) else x

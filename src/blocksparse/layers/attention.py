"""`Attention`: the type of everything that attends in a layer."""

from __future__ import annotations

from typing import Protocol, Unpack

from torch import Tensor

from blocksparse.layers.head_groups import AnyTrace, HeadGroupsTrace
from blocksparse.spec import AttentionOptions

LayerTrace = AnyTrace | HeadGroupsTrace
"""Every value of one call in a layer."""


class Attention(Protocol):
    """What attends in a layer: a `Pipeline`, `HeadGroups`, or a class that wraps one of them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
        """Attend `q` `[B, Hq, M, D]` to `k` `[B, Hkv, N, D]` and `v` `[B, Hkv, N, Dv]`: `[B, Hq, M, Dv]`.

        Args:
            options: `causal`, `scale`, `window`, `softcap`, `sinks` and `remaining`, as for a `Pipeline`.
        """
        ...

    def trace(self, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[AttentionOptions]) -> LayerTrace:
        """Make the same call with the same arguments, and return every value of it."""
        ...

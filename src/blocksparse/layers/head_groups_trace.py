"""`HeadGroupsTrace`: the traces of all groups of heads in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.execute.executor import AttentionOutput
from blocksparse.values import Trace

AnyTrace = Trace[Any, Any, Any]
Heads = tuple[int, ...]
"""KV heads, in the order in which a pipeline gets them."""


@final
@frozen(eq=False)
class HeadGroupsTrace:
    """The traces of all groups of heads in one call. The methods measure when they are called, as in a `Trace`."""

    traces: Mapping[Heads, AnyTrace | None]  # None for a dense group
    output: AttentionOutput

    @property
    def dense_because(self) -> str | None:
        """Why the executor of a group attended densely, if none of the groups was sparse."""
        reasons = [trace.dense_because for trace in self.traces.values() if trace is not None]
        return next(iter(reasons), None) if all(reasons) else None

    def density(self) -> Tensor:
        """The work done, as a share of the work of dense attention, `[B, Hq]`; 1 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.density(), dense=1.0)

    def covered_mass(self) -> Tensor:
        """The share of the dense attention weights on visited pairs, `[B, Hq]`; 1 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.covered_mass(), dense=1.0)

    def error(self) -> Tensor:
        """The relative L1 distance of the output from the dense one, `[B, Hq]`; 0 for heads of a dense group."""
        return self._per_query_head(lambda trace: trace.error(), dense=0.0)

    def _per_query_head(self, measure: Callable[[AnyTrace], Tensor], *, dense: float) -> Tensor:
        out = self.output.out
        size = out.shape[1] // sum(map(len, self.traces))
        ones = torch.ones(out.shape[:2], dtype=torch.float64, device=out.device)
        return put_back(
            {
                heads: dense * ones[:, : size * len(heads)] if trace is None else measure(trace)
                for heads, trace in self.traces.items()
            },
            size,
        )


def put_back(parts: Mapping[Heads, Tensor], size: int) -> Tensor:
    """The tensor `[B, Hkv * size, ...]` of which these are the parts."""
    by_head = {
        head: one for heads, part in parts.items() for head, one in zip(heads, part.split(size, 1), strict=True)
    }
    return torch.cat([by_head[head] for head in range(len(by_head))], dim=1)

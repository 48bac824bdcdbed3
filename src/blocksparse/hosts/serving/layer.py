"""What attends in one layer: its pipeline, prompt by prompt, or dense attention where the pipeline cannot run.

Workspace        `Workspace`: memory that an engine reserves for the keys and values of its longest request in
                 one layer.
PagedAttention   What attends in one layer: its pipeline, prompt by prompt, or dense attention where the
                 pipeline cannot run.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import lru_cache
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.serving.runs import Prefills
from blocksparse.inputs import UnsupportedError
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.observe.metrics import AuditGauges
from blocksparse.spec import AttentionOptions, AttentionSpec


@final
class Workspace:
    """All layers use it in turn, for one request after another. It is taken once, while memory is measured.

    Args:
        tokens: of the longest request.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._rooms: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def room(self, keys: Tensor, values: Tensor) -> Tensor:
        """Memory for the keys and values of the longest request.

        Args:
            keys, values: caches `[pages, Hkv, page_size, D]`, or any `[..., Hkv, tokens, D]`.
        """
        numbers = self.tokens * sum(x.shape[-3] * x.shape[-1] for x in (keys, values))
        room = self._rooms.get((keys.dtype, keys.device))
        if room is None or room.numel() < numbers:  # of the layers with most heads
            room = self._rooms[keys.dtype, keys.device] = keys.new_empty(numbers)
        return room

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return sum(math.prod(room.shape) * room.dtype.itemsize for room in self._rooms.values())


_log = logging.getLogger(__name__)


@final
@frozen(eq=False)
class PagedAttention:
    """Attends in one layer to the sparse prompts of a batch, records it, and audits some of it.

    Args:
        softcap, sinks: as of a call of the pipeline. `sinks` `[Hq]`.
    """

    pipeline: LayerPipeline
    layer: int
    recorder: DensityRecorder | None
    workspace: Workspace
    gauges: AuditGauges | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def options(self, scale: float | None, remaining: int = 0) -> AttentionOptions:
        """The arguments of a call of the pipeline."""
        return {"scale": scale, "softcap": self.softcap, "sinks": self.sinks, "remaining": remaining}

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, prefills: Prefills, *, scale: float
    ) -> None:
        """Attend the sparse rows of `query` to pages, and write the same rows of `out`.

        One prompt after another: its keys and values leave their pages for the workspace in one launch, and its
        pipeline writes the rows of `out`. So no memory is taken but what the stages need.

        Args:
            query: `[tokens, Hq, D]`, of the whole batch.
            keys: the cache of this layer, `[pages, Hkv, page_size, D]`.
            values: `[pages, Hkv, page_size, Dv]`.
            out: `[tokens, Hq, Dv]`.
        """
        for request in prefills.longest_first():
            start, stop = prefills.rows[request]
            q, rows = (x[start:stop].transpose(0, 1)[None] for x in (query, out))  # [1, Hq, M, D]
            room = self.workspace.room(keys, values)
            options = self.options(scale, prefills.remaining[request])
            self._attend(q, *prefills.table.gather_one(request, keys, values, room), rows, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: AttentionOptions) -> None:
        gauges = self.gauges if self.gauges is not None and self.gauges.wants(self.layer) else None
        try:
            if self.recorder is None and gauges is None:
                self.pipeline(q, k, v, **options, out=out)
                return
            trace = self.pipeline.trace(q, k, v, **options)
        except UnsupportedError as error:
            _warn_once(self.layer, error.because)
            if self.recorder is not None:
                self.recorder.saw_dense(self.layer, error.because)
            assert options["scale"] is not None  # an engine always gives it
            out.copy_(dense_attention(q, k, v, AttentionSpec.of(q.shape[1], options["scale"], options)))
            return
        if self.recorder is not None:
            self.recorder.saw(self.layer, trace, q_len=q.shape[2], k_len=k.shape[2])
        if gauges is not None:
            gauges.saw(self.layer, trace)
        out.copy_(trace.output.out)


@lru_cache(maxsize=1024)
def _warn_once(layer: int, because: str) -> None:
    _log.warning("blocksparse: prompts are dense in layer %d: %s", layer, because)


def record_dense(
    recorder: DensityRecorder | None,
    layer: int,
    reasons: Counter[str],
    prefills: Prefills | None,
    because: str | None,
) -> None:
    """Record the requests of a batch that are dense in a layer.

    Args:
        reasons: of the requests that are dense in every layer.
        prefills: the others.
        because: why these are dense too in this layer, if they are.
    """
    if recorder is None:
        return
    found = Counter(reasons)
    if because is not None and prefills is not None:
        found[because] += len(prefills.rows)
    for reason, requests in found.items():
        for _ in range(requests):
            recorder.saw_dense(layer, reason)

"""What attends in one layer: its pipeline, prompt by prompt, or dense attention where the pipeline cannot run."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, final

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from blocksparse.batch.pages import PageTable, gathered
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.hosts.serving.runs import Prefills
from blocksparse.inputs import UnsupportedError
from blocksparse.launch.replay import owner_of_value, replayed
from blocksparse.layers.head_groups import LayerTrace
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.observe.density_recorder import DensityRecorder
from blocksparse.observe.metrics import AuditGauges
from blocksparse.pipeline import Pipeline
from blocksparse.pipeline_core import seen, tail_of
from blocksparse.spec import AttentionOptions, AttentionSpec

# Calls that need more of it in between keep a GPU busy for longer than Python takes.
_SCRATCH = 16 << 20


@final
class Workspace:
    """Memory that an engine reserves: for the keys and values of its longest request in one layer, and scratch.

    All layers use it in turn, for one request after another. It is taken once, while memory is measured.

    Args:
        tokens: of the longest request.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._rooms: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._scratch: dict[torch.device, Tensor] = {}

    def room(self, keys: Tensor, values: Tensor | None) -> Tensor:
        """Memory for the keys and values of the longest request.

        Args:
            keys, values: caches `[pages, Hkv, page_size, D]`, or any `[..., Hkv, tokens, D]`, as of a `Prompt`.
        """
        *_, heads, _, D = keys.shape
        numbers = self.tokens * heads * (D if values is None else D + values.shape[-1])
        room = self._rooms.get((keys.dtype, keys.device))
        if room is None or room.numel() < numbers:  # of the layers with most heads
            room = self._rooms[keys.dtype, keys.device] = keys.new_empty(numbers)
        return room

    def scratch(self, q: Tensor) -> Tensor | None:
        """Memory for what a replayed call of these queries needs in between, int32; none on a CPU."""
        if (found := self._scratch.get(q.device)) is None and q.is_cuda:
            found = self._scratch[q.device] = q.new_empty(_SCRATCH // 4, dtype=torch.int32)
        return found

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return sum(x.numel() * x.itemsize for x in (*self._rooms.values(), *self._scratch.values()))


_log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What one layer gets of a prompt, or of a chunk of it, in one step."""

    q: Tensor  # [M, Hq, D]
    keys: Tensor  # the cache of the layer, [pages, Hkv, page_size, D]
    values: Tensor | None  # [pages, Hkv, page_size, Dv]; None if `keys` have them too, [pages, Hkv, page_size, 2D]
    table: PageTable
    request: int  # its row in the table
    out: Tensor  # [M, Hq, Dv]
    spec: AttentionSpec


def _apart(keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys and values of the cache of a `Prompt`. A call that is replayed need not make these views."""
    if values is not None:
        return keys, values
    keys, values = keys.split(keys.shape[3] // 2, dim=3)
    return keys, values


@final
@frozen(cache_hash=True)
class _FromPages:
    """Attends with a pipeline to keys and values that leave their pages before."""

    pipeline: LayerPipeline

    @cached_property
    def owner(self) -> object:
        """Whose the launch graphs are, for `replayed`."""
        return owner_of_value(self)

    @cached_property
    def tail(self) -> int | None:
        """The `tail_of` the pipeline, which is no `HeadGroups`."""
        stages: Any = self.pipeline
        return tail_of(stages.permuter, stages.scorer, stages.selector, stages.executor)

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor | None,
        pages: Tensor,
        room: Tensor,
        out: Tensor,
        tokens: int,
        spec: AttentionSpec,
    ) -> Tensor:
        """Write `out`. `room` gets the keys and values of as many tokens in `pages`."""
        k, v = gathered(*_apart(keys, values), pages, tokens, room)
        self.pipeline(heads_first(q), k, v, **spec.arguments(), out=heads_first(out))
        return out


def heads_first(x: Tensor) -> Tensor:
    """The view `[1, H, M, D]` of `[M, H, D]`."""
    return x.transpose(0, 1)[None]


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
    _from_pages: _FromPages = field(
        init=False, default=Factory(lambda self: _FromPages(self.pipeline), takes_self=True)
    )

    def spec(self, heads: int, scale: float, remaining: int = 0) -> AttentionSpec:
        """What this layer asks for in a prompt of so many query heads."""
        if self.sinks is None:
            return _without_sinks(scale, self.softcap, remaining)
        options: AttentionOptions = {"softcap": self.softcap, "sinks": self.sinks, "remaining": remaining}
        return AttentionSpec.of(heads, scale, options)

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor | None, out: Tensor, prefills: Prefills, *, scale: float
    ) -> None:
        """Attend the sparse rows of `query` to pages, and write the same rows of `out`.

        One prompt after another: its keys and values leave their pages for the workspace in one launch, and its
        pipeline writes the rows of `out`. So no memory is taken but what the stages need.

        Args:
            query: `[tokens, Hq, D]`, of the whole batch.
            keys, values: the cache of this layer, as of a `Prompt`.
            out: `[tokens, Hq, Dv]`.
        """
        heads = query.shape[1]
        for request in prefills.longest_first:
            start, stop = prefills.rows[request]
            # To slice takes Python longer than to ask, and a chunk of a long prompt is mostly alone in its step.
            q, rows = (x if stop - start == x.shape[0] else x[start:stop] for x in (query, out))
            spec = self.spec(heads, scale, prefills.remaining[request])
            self._attend(Prompt(q, keys, values, prefills.table, request, rows, spec))

    def attend(self, prompt: Prompt) -> None:
        """Attend to one prompt.

        Its launches follow from sizes, so that most layers of a step replay those of the first ones.

        Raises:
            UnsupportedError: the executor cannot run this.
        """
        q, keys, values, table, request, out, spec = prompt
        pipeline, room, whole = self.pipeline, self.workspace.room(keys, values), self._from_pages
        args = q, keys, values, table.pages[request], room, out, table.lengths[request]
        if isinstance(pipeline, Pipeline) and pipeline.replay:
            replayed(whole.run, *args, seen(spec, whole.tail), memory=self.workspace.scratch(q))
        else:
            whole.run(*args, spec)

    def trace(self, prompt: Prompt) -> LayerTrace:
        """Every value of the same call, which leaves `out` as it is."""
        return self.pipeline.trace(heads_first(prompt.q), *self._gathered(prompt), **prompt.spec.arguments())

    def _gathered(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        keys, values = _apart(prompt.keys, prompt.values)
        return prompt.table.gather_one(prompt.request, keys, values, self.workspace.room(keys, values))

    def _attend(self, prompt: Prompt) -> None:
        """Attend to one prompt, record it and audit it. It is dense if the executor cannot run."""
        gauges = self.gauges if self.gauges is not None and self.gauges.wants(self.layer) else None
        try:
            if self.recorder is None and gauges is None:
                self.attend(prompt)
                return
            trace = self.trace(prompt)
        except UnsupportedError as error:
            _warn_once(self.layer, error.because)
            if self.recorder is not None:
                self.recorder.saw_dense(self.layer, error.because)
            dense = dense_attention(heads_first(prompt.q), *self._gathered(prompt), prompt.spec)
            heads_first(prompt.out).copy_(dense)
            return
        if self.recorder is not None:
            self.recorder.saw(self.layer, trace, q_len=len(prompt.q), k_len=prompt.table.lengths[prompt.request])
        if gauges is not None:
            gauges.saw(self.layer, trace)
        heads_first(prompt.out).copy_(trace.output.out)


@lru_cache(maxsize=1024)
def _without_sinks(scale: float, softcap: float | None, remaining: int) -> AttentionSpec:
    return AttentionSpec(scale=scale, softcap=softcap, remaining=remaining)


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

"""Whether sparse attention saves time for a request, by its sizes and by the pipeline of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final

from attrs import frozen
from torch import Tensor

from blocksparse.execute.auto import AutoExecutor, break_even
from blocksparse.hosts.serving.runs import Split
from blocksparse.hosts.serving.settings import Settings
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.pipeline_core import EVERYTHING, keeps_everything
from blocksparse.spec import AttentionSpec

_SPEC = AttentionSpec(scale=1.0)
LITTLE_WORK = "little work"


@final
@frozen(eq=False)
class Worth:
    """The requests that stay in the native backend because selecting blocks would save nothing.

    Args:
        executor: its `dense_below` is the work below which requests stay dense.
        q, k: `[1, Hq, 1, D]` and `[1, Hkv, 1, D]`, as in the layers.
    """

    executor: AutoExecutor
    q: Tensor
    k: Tensor

    @classmethod
    def of(cls, dense_below: float | None, like: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> Worth:
        """
        Args:
            dense_below: the work below which a request stays dense. None is `break_even` in an engine.
            like: has the dtype and the device of the layers.
        """
        if dense_below is None:
            dense_below = break_even(like, in_engine=True)
        one = like.new_empty(())
        q, k = (one.expand(1, n, 1, head_dim) for n in (heads, kv_heads))
        return cls(AutoExecutor(dense_below=dense_below), q, k)

    def dense_because(self, pipeline: LayerPipeline, queries: int, keys: int, remaining: int = 0) -> str | None:
        """Why a request with so many queries, the last of its keys, stays dense in layers of this pipeline.

        So many tokens of its prompt remain after them.
        """
        # Tensors of these sizes, without separate memory.
        q, k = self.q.expand(-1, -1, queries, -1), self.k.expand(-1, -1, keys, -1)
        if self.executor.dense_because(q, k, k, _SPEC) is not None:
            return LITTLE_WORK
        parts = pipeline.groups.values() if isinstance(pipeline, HeadGroups) else (pipeline,)
        if all(
            part is None
            or (
                part.executor.may_be_left_out
                and keeps_everything(part.selector, queries, keys, causal=True, remaining=remaining)
            )
            for part in parts
        ):
            return EVERYTHING
        return None


@final
@frozen(eq=False)
class Kinds:
    """Whether a request goes sparse follows from its sizes and from the pipeline, so layers of equal ones
    share it. A batch is split once per step and kind, before any layer runs.
    """

    pipelines: tuple[LayerPipeline, ...]
    settings: Settings
    worth: Worth

    @classmethod
    def of(cls, pipelines: Iterable[LayerPipeline], settings: Settings, worth: Worth) -> Kinds:
        return cls(tuple(dict.fromkeys(pipelines)), settings, worth)

    def index(self, pipeline: LayerPipeline) -> int:
        """Which of the kinds this one is."""
        return self.pipelines.index(pipeline)

    def splits(self, starts: Sequence[int], keys: Sequence[int], **why: Any) -> list[Split]:
        """The split of a batch for each kind; without a kind, one.

        Args:
            starts, keys, why: as in `Split.of`.
        """
        split = partial(
            Split.of,
            starts,
            keys,
            min_tokens=self.settings.min_tokens,
            min_queries=self.settings.min_queries,
            **why,
        )
        if not self.pipelines:
            return [split()]
        return [split(pays=partial(self.worth.dense_because, pipeline)) for pipeline in self.pipelines]

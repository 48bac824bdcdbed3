"""`Kinds`: the different pipelines of an engine's layers, and how a batch is split for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final

from attrs import frozen

from blocksparse.integrations.serving.settings import Settings
from blocksparse.integrations.serving.split import Split
from blocksparse.integrations.serving.worth import Worth
from blocksparse.layers.schedule import LayerPipeline


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
            starts, keys, why: as of `Split.of`.
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

"""The role of an executor that also reads the pages of a cache: q, PagedKV, BlockMask -> AttentionOutput."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.batches.paged_kv import PagedKV
from blocksparse.executors.attention_output import AttentionOutput
from blocksparse.executors.executor import Executor, MaskT_contra, PermutationT_contra


class PagedExecutor(Executor[PermutationT_contra, MaskT_contra]):
    """An executor that reads keys and values where they lie, too, for a `PagedPipeline`."""

    @abstractmethod
    def attend_paged(
        self, q: Tensor, kv: PagedKV, mask: MaskT_contra, spec: AttentionSpec, out: Tensor | None = None
    ) -> AttentionOutput:
        """Make the same call with keys and values in the pages of a cache; `mask` is of `kv.k`.

        Raises:
            TypeError, ValueError: as in `check`, or the mask moves keys.
        """

    def gathers_because(self, device: torch.device) -> str | None:
        """The reason why keys and values must leave the pages of a cache on this device, or None."""
        return None

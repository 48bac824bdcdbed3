"""`Worth`: whether it pays that a request goes sparse, by its sizes alone, before any layer runs."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.execute.auto import AutoExecutor
from blocksparse.four_stages import EVERYTHING, keeps_everything
from blocksparse.layers.head_groups import HeadGroups
from blocksparse.layers.schedule import LayerPipeline
from blocksparse.spec import AttentionSpec

_SPEC = AttentionSpec(scale=1.0)
# An engine's own attention is faster than that of a call by itself, so more work pays there. Measured on an H100
# beside FlashAttention 3, which takes half a millisecond for 3e11 operations.
HALF_PRECISION_PAYS_FROM = 3e11
LITTLE_WORK = "little work"


@final
@frozen(eq=False)
class Worth:
    """What stays in the stock backend because selecting blocks would save nothing.

    Args:
        executor: whose `dense_below` says how much work is little.
        q, k: `[1, Hq, 1, D]` and `[1, Hkv, 1, D]`, of whose kind the tensors of the layers are.
    """

    executor: AutoExecutor
    q: Tensor
    k: Tensor

    @classmethod
    def of(cls, dense_below: float | None, like: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> Worth:
        """
        Args:
            dense_below: None is that of `AutoExecutor`, but `HALF_PRECISION_PAYS_FROM` on a GPU in fp16 and bf16.
            like: has the dtype and the device of the layers.
        """
        if dense_below is None and like.is_cuda and like.dtype.itemsize == 2:
            dense_below = HALF_PRECISION_PAYS_FROM
        one = like.new_empty(())
        q, k = (one.expand(1, n, 1, head_dim) for n in (heads, kv_heads))
        return cls(AutoExecutor(dense_below=dense_below), q, k)

    def dense_because(self, pipeline: LayerPipeline, queries: int, keys: int, remaining: int = 0) -> str | None:
        """Why a request with so many queries, the last of its keys, stays dense in layers of this pipeline.

        So many tokens of its prompt remain after them.
        """
        # Tensors of these sizes, without memory of their own.
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

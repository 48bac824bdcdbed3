"""The value that executors give."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(eq=False)
class AttentionOutput:
    """Attention over the kept pairs.

    A query without a kept key has `out` 0 and `lse` -inf.
    """

    out: Tensor  # [B, Hq, M, Dv], the dtype of v
    lse: Tensor | None  # [B, Hq, M] fp32, log of the softmax denominator (natural); None if the backend gives none
    visited: BlockMask | None = (
        None  # the blocks that were computed, if an early stop or dense attention made them differ from the mask
    )

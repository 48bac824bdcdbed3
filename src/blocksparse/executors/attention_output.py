"""The value that executors give."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.executors.logits import Logits
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
    logits: Logits = field(factory=Logits)  # what the executor did to logits, so that a trace measures alike

"""Value: what an executor gives."""

from __future__ import annotations

from typing import final

from attrs import frozen
from torch import Tensor

from blocksparse.selectors.block_mask import BlockMask


@final
@frozen(eq=False)
class AttentionOutput:
    """Attention over the kept pairs.

    A row with nothing kept has `out` 0 and `lse` -inf.
    """

    out: Tensor  # [B, Hq, M, Dv], the dtype of v
    lse: Tensor | None  # [B, Hq, M] fp32, natural logarithm; None where the backend gives none
    visited: BlockMask | None = (
        None  # the blocks computed, after an early stop or densely; None: those of the mask
    )

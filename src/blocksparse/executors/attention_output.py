"""The value that executors give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.autograd.graph import increment_version

from blocksparse.selectors.block_mask import BlockMask


# A dataclass, unlike the other values: torch.compile can trace how one is made, but not how an attrs object is.
@final
@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """Attention over the kept pairs.

    A query without a kept key has `out` 0 and `lse` -inf.
    """

    out: Tensor  # [B, Hq, M, Dv], the dtype of v
    lse: Tensor | None  # [B, Hq, M] fp32, log of the softmax denominator (natural); None if the backend gives none
    visit: BlockMask | Callable[[], BlockMask] | None = None  # what `visited` gives, or a function that makes it
    exact_lse: Tensor | None = None  # what `lse` would be of visited pairs alone, where it holds more than these

    @property
    def visited(self) -> BlockMask | None:
        """The blocks that were computed; None if they are those of the mask.

        An early stop computes fewer, and dense attention others. An executor may hand over a function in place of
        the mask, since a call whose caller does not ask should not spend time on it.
        """
        return self.visit() if callable(self.visit) else self.visit

    @property
    def visited_lse(self) -> Tensor | None:
        """The lse of visited pairs alone `[B, Hq, M]`, which says how much of dense attention's mass they hold."""
        return self.lse if self.exact_lse is None else self.exact_lse

    def written_to(self, out: Tensor | None) -> AttentionOutput:
        """The same output in `out`, to which it is copied unless it lies there; as it is if there is no `out`."""
        if out is None:
            return self
        if out is self.out:
            increment_version(out)  # for autograd, since kernels do not
            return self
        out.copy_(self.out)
        return AttentionOutput(out, self.lse, self.visit, self.exact_lse)

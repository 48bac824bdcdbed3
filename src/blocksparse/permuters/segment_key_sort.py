"""Sort keys by importance inside segments (PBS-Attn, sections 3.2 and 3.3)."""

from __future__ import annotations

from typing import final

from attrs import field, frozen
from torch import Tensor

from blocksparse.attention_spec import AttentionSpec
from blocksparse.checks.validators import flag, size, whole
from blocksparse.kernels.ordering.key_importance import key_importance
from blocksparse.kernels.ordering.segment_sort import segment_sort
from blocksparse.permuters.permutation import GlobalPermutation
from blocksparse.permuters.permuter import Permuter


@final
@frozen(cache_hash=True)
class SegmentKeySort(Permuter[GlobalPermutation]):
    """Sort the keys inside each whole segment of `S` tokens, most important first (PBS-Attn, eq. 9 to 11).

    The importance of a key is the mean softmax weight that the last `probe` queries give it (eq. 10). The tail of
    `N mod S` keys keeps its order. No key leaves its segment, so causality between segments is unchanged.

    Args:
        S: tokens per segment.
        probe: how many of the last queries the importance is measured with; PBS-Attn takes one block.
        per_query_head: make one order per query head, as the paper does. By default the query heads of a KV head
            share one order, by their mean importance: one copy of the keys and values per KV head is then moved
            instead of one per query head.
        causal_probe: let a probe query give weight only to keys that it may see. `False` does as the released
            code, in which it sees later keys too and the tail takes no part in the softmax.
    """

    S: int = field(default=256, converter=whole, validator=size)
    probe: int = field(default=128, converter=whole, validator=size, kw_only=True)
    per_query_head: bool = field(default=False, validator=flag, kw_only=True)
    causal_probe: bool = field(default=True, validator=flag, kw_only=True)

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        if k.shape[2] < self.S:
            return GlobalPermutation(segment=self.S)
        index = segment_sort(self._importance(q, k, spec), self.S)
        return GlobalPermutation(k_index=index.unsqueeze(2), segment=self.S)

    def _importance(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
        """Parts of the mean weight of every key over the probe queries, `[B, Hkv or Hq, P, N]`, fp32 or better."""
        N = k.shape[2]
        importance: Tensor = key_importance(
            q,
            k,
            probe=self.probe,
            seen=N if self.causal_probe else N // self.S * self.S,
            causal=spec.causal and self.causal_probe,
            scale=spec.scale,
            per_query_head=self.per_query_head,
        )
        return importance

    def alignment(self, causal: bool) -> int:
        return self.S

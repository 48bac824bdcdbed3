"""A separate order of the keys for every segment of queries, as index maps (S2O, section 3.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from einops import reduce
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.check.validators import block_size, count, flag, maybe_whole, optional, size, whole
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.order.coarse_order import check_keys, coarse_order, mean_and_products
from blocksparse.kernels.order.segments import segment_sort, whole_numbers
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.order.permutation import Permutation, Permuter
from blocksparse.spec import AttentionSpec

_SCORES_AT_ONCE = 1 << 24


@final
@frozen(cache_hash=True)
class GlobalIndexMap(Permuter[Permutation]):
    """Each segment of `S` queries reads its own keys in order, then the keys before it, best first (S2O, alg. 1).

    The first `S` slots of a map hold the segment's own keys; the slots are empty where the prompt ends inside the
    segment. The next `near` slots hold the keys right before the segment, the last one first; they are empty where
    the prompt has no more. Then come the other keys of earlier segments, sorted by `<mean query of the segment,
    key>` (eq. 2), greatest first. These scores are compared in fp32, and of equal ones the lower position comes
    first. The mean is over the segment's queries in this call, which are fewer if a chunk starts inside the
    segment. Queries are sorted inside their segment by their product with the mean of the first keys (eq. 1),
    greatest first. This order exists for causal attention only.

    Args:
        S: tokens per segment. The paper prints no value.
        prefix: how many keys of earlier segments each map holds besides the `near` ones. They are the best ones,
            and the segment attends to no others. The paper keeps all (None here), which takes `N * N / S` indices
            per head.
        coarse: choose and order the earlier keys without a full sort. Scores are rounded to 256 even steps between
            the greatest and the least score of every eighth key. Keys of one step stay in order of position. The
            mean query is rounded to the dtype of the keys. This changes little, since an early stop looks at whole
            blocks, and keys of one step have much the same weight. Queries are then sorted by the upper bits of
            their products, in int32.
        per_query_head: make one order per query head, as the paper does, which has no grouped heads. `False` makes
            one order per KV head, from the mean query of its query heads, in maps that are smaller by the number
            of these heads.
        order_queries: sort the queries inside their segment. `False` leaves them in place.
        guide: how many of the first keys are averaged to order the queries. `S` if None, as in the paper.
        near: how many keys right before the segment stand together instead of among the sorted ones. Then
            `Ranked(inner, first=Band(near))` opens a row with few blocks. The paper sorts all of them.
    """

    S: int = field(default=256, converter=whole, validator=block_size)
    prefix: int | None = field(default=None, converter=maybe_whole, validator=optional(size), kw_only=True)
    coarse: bool = field(default=False, validator=flag, kw_only=True)
    per_query_head: bool = field(default=True, validator=flag, kw_only=True)
    order_queries: bool = field(default=True, validator=flag, kw_only=True)
    guide: int | None = field(default=None, converter=maybe_whole, validator=optional(size), kw_only=True)
    near: int = field(default=0, converter=whole, validator=count, kw_only=True)

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Permutation:
        if not spec.causal:
            raise ValueError(
                "'GlobalIndexMap' is for causal attention, since it orders the keys before each segment. Call the "
                "pipeline with causal=True."
            )
        # Whole segments before the first query, and tokens before it in its own segment.
        first, lead = divmod(k.shape[2] - q.shape[2], self.S)
        if not self.order_queries:
            return Permutation(self._keys(block_mean(q, self.S, lead=lead), k, first), group=self.S)
        guide = k[:, :, : self.guide or self.S].mean(2, dtype=torch.promote_types(k.dtype, torch.float32))
        mean, products = mean_and_products(q, guide, self.S, lead=lead)
        return Permutation(self._keys(mean, k, first), self._queries(products, lead), group=self.S)

    def _keys(self, mean: Tensor, k: Tensor, first: int) -> Tensor:
        """The key in every slot of the segments from `first` on, `[B, H, G, slots]` int32."""
        S, Hkv, N = self.S, k.shape[1], k.shape[2]
        if not self.per_query_head:
            mean = reduce(mean, "B (H R) G D -> B H G D", "mean", H=Hkv)
        B, H, G, _ = mean.shape
        own = torch.arange(first * S, (first + G) * S, dtype=torch.int32, device=k.device)
        own[N - first * S :] = -1  # the prompt may end inside the last segment
        own = own.view(G, S)
        start = own[:, :1]
        near = min(self.near, (first + G - 1) * S)  # no segment has more keys before it
        longest = (first + G - 1) * S - near
        width = longest if self.prefix is None else min(self.prefix, longest)
        index = torch.empty((B, H, G, S + near + width), dtype=torch.int32, device=k.device)
        index[..., :S] = own
        index[..., S : S + near] = (start + torch.arange(-1, -1 - near, -1, device=k.device)).clamp_min(-1)
        ordered = index[..., S + near :]
        if self.coarse:
            check_keys(longest)
            coarse_order(mean, k, first * S - near, S, ordered)
            return index
        ordered.fill_(-1)
        keys = k[:, :, :longest].to(mean.dtype)
        # A few segments at a time, because the scores of all of them would take more memory than the map.
        step = max(1, _SCORES_AT_ONCE // (B * H * max(1, longest)))
        for g in range(0, G, step):
            some = slice(g, min(g + step, G))
            end = max(0, (first + some.stop - 1) * S - near)  # none of these segments orders keys from here on
            scores = products(mean[:, :, some], keys[:, :, :end])
            best = min(width, end)
            ordered[:, :, some, :best] = _best(scores, start[some] - near, best)
        return index

    def _queries(self, products: Tensor, lead: int) -> Tensor:
        """The query in every slot, `[B, Hq, M]` int32. In its segment, `lead` slots precede the first query."""
        M, value = products.shape[2], _numbers(products)
        # Padding makes all segments whole; +inf keeps it before the first query, -inf after the last one.
        if lead:
            value = pad(value, (lead, 0), value=float("inf"))
        if after := -(lead + M) % self.S:
            value = pad(value, (0, after), value=float("-inf"))
        order = segment_sort(value, self.S, coarse=self.coarse)[..., lead : lead + M]
        return order - lead if lead else order

    def alignment(self, causal: bool) -> int:
        return self.S


def _best(scores: Tensor, start: Tensor, count: int) -> Tensor:
    """The `count` positions before `start` `[G, 1]` with the greatest `scores` `[B, H, G, N]`, best first.

    Where there are fewer positions, -1 follows. Ties go to the lower position on every device.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    rank = whole_numbers(_numbers(scores)).where(position < start, torch.iinfo(torch.int32).min)
    if count == rank.shape[-1]:
        best = rank.argsort(dim=-1, descending=True, stable=True)
    else:
        # Each number holds a score and a position, so no two are equal, and `topk` need not be stable.
        ranked = ((rank.long() << 32) + (0xFFFFFFFF - position)).topk(count, dim=-1).values
        best = 0xFFFFFFFF - (ranked & 0xFFFFFFFF)
    return best.where(torch.arange(count, device=scores.device) < start, -1).int()


def _numbers(scores: Tensor) -> Tensor:
    """The scores as finite fp32 numbers: NaN becomes the least of them, and -0 becomes 0."""
    return scores.float().nan_to_num(nan=torch.finfo(torch.float32).min) + 0.0

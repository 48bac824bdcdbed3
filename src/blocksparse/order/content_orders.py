"""Orders of tokens by what they hold: in segments of the prompt, before segments, or in clusters of like ones."""

from __future__ import annotations

from math import lcm
from typing import final

import torch
from attrs import evolve, field, frozen
from einops import reduce
from torch import Tensor
from torch.nn.functional import normalize, pad

from blocksparse.check.stage import Declared, check_takes, declared
from blocksparse.check.validators import (
    a,
    block_size,
    count,
    flag,
    hash_seed,
    maybe_whole,
    multiple,
    optional,
    size,
    whole,
)
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.masks.visibility import counter_hash
from blocksparse.kernels.order.coarse_order import check_keys, coarse_order, mean_and_products
from blocksparse.kernels.order.segments import key_importance, segment_sort, whole_numbers
from blocksparse.kernels.score.block_mean import block_mean
from blocksparse.order.permutation import GlobalPermutation, Identity, Permutation, Permuter
from blocksparse.spec import AttentionSpec


@final
@frozen(cache_hash=True)
class SegmentKeySort(Permuter[GlobalPermutation]):
    """Sort the keys inside each whole segment of `S` tokens, most important first (PBS-Attn, eq. 9 to 11).

    The importance of a key is the mean softmax weight that the last `last_q` queries give it (eq. 10). The tail of
    `N mod S` keys keeps its order. No key leaves its segment, so causality between segments is unchanged.

    Args:
        S: tokens per segment.
        last_q: how many of the last queries the importance is measured with. PBS-Attn takes one block.
        per_query_head: make one order per query head, as the paper does. By default the query heads of a KV head
            share one order, by their mean importance. This moves one copy of the keys and values per KV head.
        causal_last_q: they give weight only to keys that they may see. `False` does as the released code, in which
            it sees later keys too and the tail takes no part in the softmax.
    """

    S: int = field(default=256, converter=whole, validator=size)
    last_q: int = field(default=128, converter=whole, validator=size, kw_only=True)
    per_query_head: bool = field(default=False, validator=flag, kw_only=True)
    causal_last_q: bool = field(default=True, validator=flag, kw_only=True)

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        if k.shape[2] < self.S:
            return GlobalPermutation(segment=self.S)
        index = segment_sort(self._importance(q, k, spec), self.S)
        return GlobalPermutation(k_index=index.unsqueeze(2), segment=self.S)

    def _importance(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
        """Parts of the mean weight of every key over the last queries, `[B, Hkv or Hq, P, N]`, fp32 or better."""
        seen = k.shape[2] if self.causal_last_q else k.shape[2] // self.S * self.S
        causal, each = spec.causal and self.causal_last_q, self.per_query_head
        importance: Tensor = key_importance(
            q, k, last_q=self.last_q, seen=seen, causal=causal, scale=spec.scale, per_query_head=each
        )
        return importance

    def alignment(self, causal: bool) -> int:
        return self.S


_WORKSPACE = 2**28  # bytes of similarities that are held at a time


@final
@frozen(cache_hash=True)
class SegmentQuerySort(Permuter[GlobalPermutation]):
    """Sort queries inside each whole segment by their most similar keys (PBS-Attn, section 4.3).

    A centroid is the mean key of a block. A query is assigned to the centroid with which its cosine is greatest.
    The queries of a segment are sorted by centroid, then by cosine, greatest first. Ties keep their order. The
    paper only says "greedily"; here any number of queries may be assigned to a centroid. When causal, a query
    chooses among the centroids of earlier segments, so that the order depends on no key of the same segment or
    later. The blocks of the same segment are always kept. The first segment and the tail of `N mod S` tokens keep
    their order. If a chunk holds a part of a segment, that part is sorted.

    Args:
        S: tokens per segment, a multiple of `block`. Segments are counted from position 0.
        block: keys per centroid.
        keys: a permuter that orders the keys. By default they stay in place. Centroids are blocks in its order.
            With `SegmentKeySort(S)` both keys and queries are sorted.

    Raises:
        ValueError: in a call, if the permuter `keys` moves queries.
    """

    S: int = field(default=256, converter=whole, validator=size)
    block: int = field(default=128, converter=whole, validator=block_size, kw_only=True)
    keys: Permuter[GlobalPermutation] = field(factory=Identity, validator=a(Permuter), kw_only=True)

    def __attrs_post_init__(self) -> None:
        multiple("S", self.S, "block", self.block)
        check_takes((Declared(type(self), GlobalPermutation),), declared(self.keys, Permuter, 0))

    @property
    def moves_keys(self) -> bool:
        return self.keys.moves_keys

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        permutation = self.keys(q, k, spec)
        if permutation.q_index is not None:
            raise ValueError(f"'keys' must leave queries in place: {self.keys!r}")
        M, S = q.shape[2], self.S
        offset = k.shape[2] - M if spec.causal else 0
        sorted_to = (offset + M) // S * S  # position where the tail begins
        lead, whole = offset % S, sorted_to - offset
        # The keys that make centroids: if causal, those before the last whole segment.
        known = sorted_to - S if spec.causal else k.shape[2]
        if whole <= 0 or known <= 0:
            return permutation

        centroids = self._centroids(permutation.gather_keys(k)[:, :, :known])
        nearest, cosine = self._nearest(q[:, :, :whole], centroids, offset=offset, causal=spec.causal)
        # The slots before a chunk's first query get values that sort first, so they stay where they are.
        nearest, cosine = pad(nearest, (lead, 0), value=-1), pad(cosine, (lead, 0))
        order = _argsort(nearest.unflatten(2, (-1, S)), cosine.unflatten(2, (-1, S)))
        start = torch.arange(-lead, whole, S, device=q.device)
        index = (order + start[:, None]).flatten(2)[:, :, lead:]  # [B, Hq, whole]
        tail = torch.arange(whole, M, device=q.device).expand(*index.shape[:2], -1)
        return evolve(permutation, q_index=torch.cat((index, tail), dim=2).int())

    def _centroids(self, k: Tensor) -> Tensor:
        """The mean keys of blocks, at length 1, `[B, H, N, D] -> [B, H, blocks, D]` in fp32 or better."""
        blocks = pad(k, (0, 0, 0, -k.shape[2] % self.block)).unflatten(2, (-1, self.block))
        # Vectors are scaled to length 1, so a sum serves as well as a mean, also for a short last block.
        return normalize(blocks.sum(3, dtype=torch.promote_types(k.dtype, torch.float32)), dim=-1)

    def _nearest(self, q: Tensor, centroids: Tensor, *, offset: int, causal: bool) -> tuple[Tensor, Tensor]:
        """The centroid of each query and its cosine with it, `[B, Hq, M]` each."""
        (B, Hq, M, _), blocks = q.shape, centroids.shape[2]
        step = max(1, _WORKSPACE // (B * Hq * blocks * centroids.dtype.itemsize))
        per_segment = self.S // self.block
        nearest, cosines = [], []
        for first in range(0, M, step):
            last = min(first + step, M)
            part = normalize(q[:, :, first:last].to(centroids.dtype), dim=-1)
            # The last query of the part may choose among the most centroids. Queries of the first segment may
            # choose none, and are masked below.
            end = max((offset + last - 1) // self.S * per_segment, 1) if causal else blocks
            cosine = products(part, centroids[:, :, :end])
            if causal:
                known = torch.arange(offset + first, offset + last, device=q.device) // self.S * per_segment
                cosine = cosine.masked_fill_(torch.arange(end, device=q.device) >= known[:, None], float("-inf"))
            best = cosine.max(-1)  # of equal ones, the first
            nearest.append(best.indices)
            cosines.append(best.values)
        return torch.cat(nearest, dim=2), torch.cat(cosines, dim=2)

    def alignment(self, causal: bool) -> int:
        return lcm(self.S, self.keys.alignment(causal))


def _argsort(rising: Tensor, falling: Tensor) -> Tensor:
    """The stable order along the last axis by `rising`, least first, and then by `falling`, greatest first."""
    order = falling.argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, rising.gather(-1, order).argsort(dim=-1, stable=True))


_DISTANCES = 2**26  # that are held at a time
_KEYS, _QUERIES = 0, 1  # what draws are for


@final
@frozen(cache_hash=True)
class KMeansOrder(Permuter[GlobalPermutation]):
    """Put queries, and keys, cluster by cluster, with clusters found by k-means for each head.

    Distances are Euclidean. The clusters begin at random tokens. After the last iteration tokens are sorted by
    their cluster, and stay in order inside it. An empty cluster keeps its centre. The blocks of a pipeline have a
    fixed size, and so a block may hold the end of one cluster and the beginning of another. The same inputs give
    the same order. Source: SVG2, arXiv 2505.18875, section 4.1.

    It is made for attention that is not causal. Causal attention is exact too, but clusters are of all tokens of a
    call. So the choice depends on later tokens, and many blocks hold pairs above the diagonal. It takes twice
    `iterations * clusters * N * D` multiplications per head, for queries and for keys. So keep a choice for
    several steps or layers.

    Args:
        q_clusters: clusters of queries per query head.
        k_clusters: clusters of keys per KV head.
        iterations: how often centres move.
        seed: of the first centres. From 0 to 2^32 - 1.
        prefix: tokens at the start that stay in place. Text, for example.
        suffix: the same at the end.
    """

    q_clusters: int = field(default=300, converter=whole, validator=size)
    k_clusters: int = field(default=1000, converter=whole, validator=size)
    iterations: int = field(default=50, converter=whole, validator=size, kw_only=True)
    seed: int = field(default=0, converter=whole, validator=hash_seed, kw_only=True)
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)
    suffix: int = field(default=0, converter=whole, validator=count, kw_only=True)

    by_row = "orders all queries of a call together, and a part has some"

    def __call__(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> GlobalPermutation:
        """The order of `q` `[B, Hq, M, D]` and `k` `[B, Hkv, N, D]`."""
        return GlobalPermutation(
            self._order(k, self.k_clusters, _KEYS).unsqueeze(2), self._order(q, self.q_clusters, _QUERIES)
        )

    def _order(self, x: Tensor, clusters: int, kind: int) -> Tensor:
        """Tokens of `x` `[B, H, N, D]` by cluster, `[B, H, N]` int32."""
        N = x.shape[2]
        start, end = min(self.prefix, N), max(N - self.suffix, min(self.prefix, N))
        position = torch.arange(N, device=x.device, dtype=torch.int32).expand(*x.shape[:2], N)
        if end == start:
            return position
        moved = x[:, :, start:end].to(wide_dtype(x))
        label = self._labels(moved, min(clusters, end - start), kind)
        order = label.argsort(dim=-1, stable=True).int() + start
        return torch.cat((position[:, :, :start], order, position[:, :, end:]), dim=2)

    def _labels(self, x: Tensor, clusters: int, kind: int) -> Tensor:
        """The cluster of each token of `x` `[B, H, n, D]`, `[B, H, n]` int64."""
        n = x.shape[2]
        token = torch.arange(n, device=x.device)
        draws = counter_hash(self.seed, torch.full_like(token, kind), token)
        centres = x[:, :, draws.argsort(stable=True)[:clusters]]  # of different tokens, the same in all heads
        label = _nearest(x, centres)
        for _ in range(self.iterations):
            sums, members = _sums(x, label, centres.shape[2])
            centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
            label = _nearest(x, centres)
        return label


def _sums(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Sums of the tokens of each cluster `[B, H, clusters, D]`, by products, whose bits repeat; their number."""
    cluster = torch.arange(clusters, device=x.device).unsqueeze(1)
    sums, members = x.new_zeros(*x.shape[:2], clusters, x.shape[3]), x.new_zeros(*x.shape[:2], clusters, 1)
    step = max(1, _DISTANCES // (x.shape[0] * x.shape[1] * clusters))
    for part, its in zip(x.split(step, dim=2), label.split(step, dim=2), strict=True):
        belongs = (its.unsqueeze(2) == cluster).to(x.dtype)  # [B, H, clusters, tokens]
        sums += products(belongs, part.mT)
        members += belongs.sum(-1, keepdim=True)
    return sums, members


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    """The index of the centre that is nearest to each token, `[B, H, n]`; the lowest of several."""
    half = centres.square().sum(-1).unsqueeze(2) / 2
    step = max(1, _DISTANCES // (x.shape[0] * x.shape[1] * centres.shape[2]))
    return torch.cat([(half - products(part, centres)).argmin(-1) for part in x.split(step, dim=2)], dim=2)


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
            one order per KV head, from the mean query of its query heads. Maps are smaller then.
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
    """The `count` positions before `start` `[G, 1]` with the greatest `scores`, ties to the lower, then -1."""
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

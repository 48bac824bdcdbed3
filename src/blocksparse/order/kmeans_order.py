"""Queries and keys in the order of clusters of like ones (SVG2, arXiv 2505.18875, section 4.1)."""

from __future__ import annotations

from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from blocksparse.check.validators import count, hash_seed, size, whole
from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.kernels.masks.reach import counter_hash
from blocksparse.order.permutation import GlobalPermutation, Permuter
from blocksparse.spec import AttentionSpec

_DISTANCES = 2**26  # that are held at a time
_KEYS, _QUERIES = 0, 1  # what draws are for


@final
@frozen(cache_hash=True)
class KMeansOrder(Permuter[GlobalPermutation]):
    """Put queries, and keys, cluster by cluster, with clusters found by k-means for each head.

    Distances are Euclidean. The clusters begin at tokens that are drawn at random; after the last iteration tokens
    are sorted by their cluster, and stay in order inside it. An empty cluster keeps its centre. The
    blocks of a pipeline have a fixed size, and so a block may hold the end of one cluster and the beginning of
    another. The same inputs give the same order.

    It is made for attention that is not causal. Causal attention is exact too, but clusters are of all tokens of a
    call, so that the choice depends on later ones, and many blocks hold pairs above the diagonal. It takes twice
    `iterations * clusters * N * D` multiplications per head, for queries and for keys: keep a choice for several
    steps or layers.

    Args:
        q_clusters: clusters of queries per query head.
        k_clusters: clusters of keys per KV head.
        iterations: how often centres are moved.
        seed: of the tokens at which clusters begin, in [0, 2^32).
        prefix: how many tokens at the start stay in place, such as text.
        suffix: how many tokens at the end do.
    """

    q_clusters: int = field(default=300, converter=whole, validator=size)
    k_clusters: int = field(default=1000, converter=whole, validator=size)
    iterations: int = field(default=50, converter=whole, validator=size, kw_only=True)
    seed: int = field(default=0, converter=whole, validator=hash_seed, kw_only=True)
    prefix: int = field(default=0, converter=whole, validator=count, kw_only=True)
    suffix: int = field(default=0, converter=whole, validator=count, kw_only=True)

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

    def alignment(self, causal: bool) -> int:
        raise ValueError(f"'{type(self).__name__}' orders all queries of a call together, and a part has some")


def _sums(x: Tensor, label: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The sum of the tokens of each cluster `[B, H, clusters, D]`, and their number `[B, H, clusters, 1]`.

    They are products, since sums by atomic additions have other bits in every call.
    """
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

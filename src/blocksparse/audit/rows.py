"""Dense attention of a few random queries, compared with what a sparse call gave for them."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.gemm.products import products, wide_dtype
from blocksparse.layers.head_groups import AnyTrace

_AT_ONCE = 8  # queries of each head; their logits over 131,072 keys and 32 heads take 128 MiB


def row_sums(trace: AnyTrace, rows: int, generator: torch.Generator) -> Tensor:
    """Compare random queries of a call with dense attention, `[4, rows]` float64, without waiting for the device.

    The queries are cut into `rows` stretches of equal length, and each head of each entry of the batch draws one
    query of its own from each stretch. Column `i` of the result has sums over the draws from stretch `i`: of the
    covered mass, which is the share of the dense weights, sinks left out, that lies on visited pairs; the number
    of draws; and `sum|o - o'|` and `sum|o'|` of the output `o` and dense attention's `o'`.

    Heads draw for themselves, because queries that are hard are often hard for many heads: a sample of 64
    positions may miss them, but hardly in every head.

    Raises:
        ValueError: the executor gave no `lse`, which tells how much mass it covered.
    """
    q, k, v, output = trace.q, trace.k, trace.v, trace.output
    if (visited := output.visited_lse) is None:
        raise ValueError(
            "an audit needs an executor that gives lse, and FlexExecutor gives none on a CPU: take CpuExecutor"
        )
    (B, Hq, M, _), N, causal = q.shape, k.shape[2], trace.mask.grid.causal
    stretch, query = M / rows, draw(B, Hq, M, rows, generator)
    key, spec = torch.arange(N, device=q.device), trace.spec
    sums = []
    for start in range(0, rows, _AT_ONCE):
        some = query[:, :, start : start + _AT_ONCE]
        # The host knows a key that no query of these stretches sees, without knowing the queries.
        end = min(N, N - M + int((start + _AT_ONCE) * stretch) + 1) if causal else N
        # [B, Hq, some, end]
        logits = spec.capped(products(_rows(q, some), k[:, :, :end]) * spec.scale)
        if causal:
            seen = trace.mask.grid.sees(some.unsqueeze(-1) + (N - M), key[:end])
            logits.masked_fill_(~seen, float("-inf"))
        most = logits.amax(-1, keepdim=True)
        weights = logits.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        plain = (most + total.log()).squeeze(-1)
        dense, lse = spec.with_sinks(_weighted(weights, v[:, :, :end]) / total, plain)
        # With a sink, both denominators have it, and its part is taken out again: the rest is `exp(plain - lse)`.
        more = visited.gather(2, some) - lse
        covered = more.exp() if spec.sinks is None else _without_sinks(more, plain - lse)
        distance = _rows(output.out, some).to(dense.dtype) - dense
        parts = covered, torch.ones_like(covered), distance.abs().sum(-1), dense.abs().sum(-1)
        sums.append(torch.stack([part.double().sum((0, 1)) for part in parts]))
    return torch.cat(sums, dim=1)


def _without_sinks(more: Tensor, keys: Tensor) -> Tensor:
    """The covered share of the weights of keys alone, from logarithms of shares of the whole dense softmax.

    Args:
        more: of what the sparse call has, its keys and the sink.
        keys: of what all keys have.
    """
    return (1 + more.expm1() / keys.exp().clamp_min(1e-30)).clamp(0, 1)


def draw(B: int, H: int, M: int, rows: int, generator: torch.Generator) -> Tensor:
    """One of M queries from each of `rows` stretches of equal length, `[B, H, rows]` int64, rising.

    Every query is as likely as every other one. If `rows` is M, each is drawn once.
    """
    inside = torch.rand((B, H, rows), dtype=torch.float64, device=generator.device, generator=generator)
    stretch = torch.arange(rows, device=generator.device)
    return ((stretch + inside) * (M / rows)).long().clamp_max(M - 1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` `[B, H, some]` of `x` `[B, H, M, D]`: `[B, H, some, D]`."""
    taken: Tensor = x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
    return taken


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """`weights` `[B, Hq, rows, N]`, from 0 to 1, times `v` `[B, Hkv, N, Dv]`, to fp32 or better.

    Tensor cores multiply half precision, but weights rounded to it would add an error as large as that of a good
    sparse call. So each weight is the sum of two numbers in half precision. The factor keeps small weights out of
    the range where fp16 loses digits.
    """
    if v.dtype == wide_dtype(v):
        exact: Tensor = products(weights, v.mT)
        return exact
    scaled = weights * 2.0**15
    high = scaled.to(v.dtype)
    low = (scaled - high).to(v.dtype)
    one, other = products(torch.cat((high, low), dim=2), v.mT).chunk(2, dim=2)
    total: Tensor = (one + other) * 2.0**-15
    return total

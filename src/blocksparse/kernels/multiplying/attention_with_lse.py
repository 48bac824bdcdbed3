"""Exact attention to some keys and its lse, in fp32 or better: for what gathers keys in plain torch.

    out[n, i] = sum_j softmax_j(scale * q[n, i] . k[n, j]) v[n, j]      lse[n, i] = log sum_j exp(scale * q[n, i] . k[n, j])

over the keys `j` that are not hidden from query `i`. On CPUs PyTorch's flash kernel computes it. Where that cannot, plain
products do, for a few queries at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.multiplying.flash_on_cpu import flash_on_cpu
from blocksparse.kernels.multiplying.products import products

PLACES = 256
"""Queries whose logits plain products hold at a time."""


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[n, H, M, D]` to `k` `[n, H, keys, D]` and `v` `[n, H, keys, Dv]`, and its lse `[n, H, M]`.

    A query that sees no key gets an output of 0 and an lse of -inf. A hidden key has no influence, if its value is finite.

    Args:
        causal: query `i` sees the keys up to `i`; there are as many keys as queries.
        hidden: `[n|1, H|1, M, keys]` bool, pairs that do not count; not with `causal`.
        softcap: a logit `x` becomes `softcap * tanh(x / softcap)`; the flash kernel knows none.
    """
    if softcap is None and q.device.type == "cpu":
        out, lse = flash_on_cpu(q, k, v, scale, causal=causal, hidden=hidden)
        # The kernel gives an lse of 0 where no key is seen, and also for a few logits that are all NaN. It adds -inf to
        # hidden logits, which leaves NaN what was NaN or +inf.
        if bool(lse.all()) and (hidden is None or not bool(lse.isnan().any())):
            return out, lse
    if hidden is None:
        hidden = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1 if causal else k.shape[2])
    flat_k, flat_v = (x.flatten(0, 1).unsqueeze(0) for x in (k, v.mT))
    parts = [
        _plain(some, flat_k, flat_v, their_hidden, scale, softcap)
        for some, their_hidden in zip(q.split(PLACES, 2), hidden.split(PLACES, 2), strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same of `q` `[n, H, M, D]`, `k` `[1, n H, keys, D]` and `v` `[1, n H, Dv, keys]`, in plain products."""
    logits = products(q.flatten(0, 1).unsqueeze(0), k)[0].mul_(scale).unflatten(0, q.shape[:2])
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    logits.masked_fill_(hidden, float("-inf"))
    peak = logits.amax(-1, keepdim=True)
    weight = logits.softmax(-1)
    lse = peak - weight.amax(-1, keepdim=True).log()  # the greatest weight is 1 / sum(exp(logits - peak))
    nothing = peak == float("-inf")  # queries that see none of these keys
    weight.masked_fill_(nothing, 0.0)
    lse.masked_fill_(nothing, float("-inf"))
    return products(weight.flatten(0, 1).unsqueeze(0), v)[0].unflatten(0, q.shape[:2]), lse.squeeze(-1)

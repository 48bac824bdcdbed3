"""What a permutation and a mask mean, worked out from positions alone, and attention over it in float64.

Nothing here asks the grid or the mask for a position, a pair or a row: a mistake there must not hide here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import blocksparse as bs


def pairs_of(permutation: bs.Permutation, mask: bs.BlockMask, q: Tensor, k: Tensor) -> Tensor:
    """Which keys each query attends to, `[B, Hq, M, N]` bool, both in original order."""
    (B, Hq, M, _), N = q.shape, k.shape[2]
    causal, q_block, k_block = mask.grid.causal, mask.grid.q_block, mask.grid.k_block
    offset = N - M if causal else 0  # original position of query 0
    query = torch.arange(M)
    maps = torch.arange(N).view(1, 1, 1, N) if permutation.k_index is None else permutation.k_index.cpu().long()
    group = query.new_zeros(M)
    if permutation.group is not None:  # groups are counted from position 0, the first is that of query 0
        group = (offset + query) // permutation.group - offset // permutation.group
    pairs = torch.zeros(B, Hq, M, N, dtype=torch.bool)
    for b in range(B):
        for h in range(Hq):
            slot = query if permutation.q_index is None else permutation.q_index[b, h].cpu().long().argsort()
            row = (offset % q_block + slot) // q_block  # rows lie on the grid of the whole prompt
            heads = mask.keep.shape[1]
            keep = mask.keep[b, h * heads // Hq].cpu()[row]  # [M, cols]
            key = maps[b % maps.shape[0], h * maps.shape[1] // Hq][group]  # [M, slots]
            kept = keep[:, torch.arange(key.shape[1]) // k_block] & (key >= 0)
            counts = torch.zeros(M, N, dtype=torch.int32).scatter_add_(1, key.clamp_min(0), kept.int())
            pairs[b, h] = counts > 0
    if not causal:
        return pairs
    distance = offset + query[:, None] - torch.arange(N)
    return pairs & (distance >= 0) & (distance < (mask.grid.window or N))


def attention(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over `pairs` in float64, `[B, Hq, M, Dv]`, and how far fp32 may be off, `[B, Hq, M, 1]`.

    An error of `e` in a logit is one of `2 e` in a weight; a logit errs by what its largest terms round to.
    """
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.mT * scale).masked_fill(~pairs, float("-inf"))
    weights = logits.softmax(-1).where(pairs.any(-1, keepdim=True), 0.0)
    seen = (q.abs() @ k.abs().mT * abs(scale)).where(pairs, 0.0).amax(-1, keepdim=True)
    largest = v.abs().amax((-1, -2), keepdim=True)
    return weights @ v, (2 * (q.shape[-1] + 8) * seen + 16 + k.shape[2] ** 0.5) * largest


def assert_means(
    output: bs.AttentionOutput, permutation: bs.Permutation, mask: bs.BlockMask, scale: float, *qkv: Tensor
) -> None:
    """The output is attention over exactly the pairs that `mask`, or what was visited of it, means."""
    q, k, v = qkv
    visited = mask if output.visited is None else output.visited
    assert not bool((visited.keep & ~mask.keep).any()), "visited what was not kept"
    pairs = pairs_of(permutation, visited, q, k)
    want, unit = attention(q, k, v, pairs, scale)
    assert output.out.shape == want.shape
    assert output.out.dtype == v.dtype
    got, own = output.out.cpu().double(), torch.finfo(v.dtype)
    rounding = own.eps * (2 * v.abs().double().max().cpu() + own.smallest_normal)
    allowed = torch.finfo(torch.promote_types(v.dtype, torch.float32)).eps * unit + rounding
    error = (got - want).abs()
    most = f"off by {float(error.max()):.3g}, allowed are {float(allowed.max()):.3g}"
    assert bool((error <= allowed).all()), most
    empty = ~pairs.any(-1)
    assert bool((got[empty] == 0).all()), "a row with nothing kept is not 0"
    if output.lse is not None:
        assert torch.equal(output.lse.cpu() == float("-inf"), empty), "lse is -inf where something is kept"


def relative_l1(got: Tensor, want: Tensor) -> float:
    """The sum of errors over the sum of what is right."""
    return float((got.double() - want.double()).abs().sum() / want.double().abs().sum())


def assert_blind_to_later(
    executor: bs.Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, spec: bs.AttentionSpec
) -> None:
    """With the choice held, changing every token from one on leaves the rows before it bit-identical."""
    want, offset = executor(q, k, v, mask, spec), k.shape[2] - q.shape[2]
    for token in (1, 40, 63, 64, 100, 127, 128, 129, 200, 255, 256, 399, 511, 513, 900):
        if offset < token < k.shape[2]:
            after = q.clone(), k.clone(), v.clone()
            for x, first in zip(after, (token - offset, token, token), strict=True):
                x[:, :, first:] = 10 * torch.randn_like(x[:, :, first:])
            assert_same_bits(executor(*after, mask, spec), want, slice(token - offset))


def assert_same_bits(got: bs.AttentionOutput, want: bs.AttentionOutput, rows: Any = slice(None)) -> None:
    """Outputs and lse are equal, of all queries or of these."""
    assert got.lse is not None
    assert want.lse is not None
    assert torch.equal(got.out[:, :, rows], want.out[:, :, rows])
    assert torch.equal(got.lse[:, :, rows], want.lse[:, :, rows])


def same(one: Any, other: Any) -> bool:
    """Bit for bit, and equal where both are NaN."""
    numbers = torch.equal(one.nan_to_num(nan=1.5), other.nan_to_num(nan=1.5))
    return numbers and torch.equal(one.isnan(), other.isnan())

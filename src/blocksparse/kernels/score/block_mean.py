"""One vector or one number for each block of tokens: their mean, and how alike they are.

    block_mean        out[b, h, i] = sum_j x[b, h, j] / (tokens of block i)
    block_similarity  out[b, h, i] = |mean_j (x[b, h, j] - c[b, h]) / |x[b, h, j] - c[b, h]||^2, at most 1

Sums are over the tokens `j` of block `i`, in a fixed order; `c` is the mean of all tokens. On GPUs each is one launch that
reads every token once, through an index map if one is given, so that no token is moved; `c` takes one more pass. Means of
queries and keys share a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import FLOATS, compiled, on_gpus
from blocksparse.kernels.common.sizes import Heads
from blocksparse.kernels.layout.gather import gather_rows
from blocksparse.kernels.score import cpu_scores

_WORKSPACE = 2**25  # entries of unit vectors that are held at a time


@on_gpus(*FLOATS)
@compiled(cpu_scores.block_mean_on_cpu, lambda x, *_, **__: cpu_scores.takes(x))
def block_mean(
    x: Tensor,
    block: int,
    lead: int = 0,
    padded_tail: bool = False,
    index: Tensor | None = None,
    heads: Heads = None,
) -> Tensor:
    """Mean over the tokens of each block, `[B, Hx, N, D] -> [B, H, blocks, D]`, in fp32 or better.

    Args:
        block: slots per block.
        lead: empty places before the first token in block 0. Fewer than `block`.
        padded_tail: divide the sum of a short block by `block` instead of by its tokens.
        index: `[B, H, N]` int32, the token in each slot. `Hx` divides `H`.
        heads: those whose means are asked for. In the others entries have no meaning.
    """
    x = _token_by_token(x if index is None else gather_rows.reference(x, index))
    N, dtype = x.shape[2], torch.promote_types(x.dtype, torch.float32)
    whole_from = min(-lead % block, N)
    whole_to = whole_from + (N - whole_from) // block * block
    parts = [x[:, :, whole_from:whole_to].unflatten(2, (-1, block)).mean(3, dtype=dtype)]
    for rest, first in ((x[:, :, :whole_from], True), (x[:, :, whole_to:], False)):
        if rest.shape[2]:
            count = block if padded_tail else rest.shape[2]
            mean = rest.sum(2, keepdim=True, dtype=dtype) / count
            parts = [mean, *parts] if first else [*parts, mean]
    return torch.cat(parts, dim=2)


@on_gpus(*FLOATS)
def block_means(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    lead: int = 0,
    padded_tail: bool = False,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`block_mean` of `q` `[B, Hq, M, D]` and of `k` `[B, Hkv, N, D]` in one launch; `lead` is that of queries."""
    return (
        block_mean(q, q_block, lead=lead, padded_tail=padded_tail, index=q_index),
        block_mean(k, k_block, padded_tail=padded_tail, index=k_index),
    )


@on_gpus(*FLOATS)
@compiled(cpu_scores.block_similarity_on_cpu, lambda x, *_, **__: cpu_scores.takes(x))
def block_similarity(
    x: Tensor, block: int, lead: int = 0, centred: bool = False, index: Tensor | None = None
) -> Tensor:
    """Mean cosine of all pairs of tokens of each block, `[B, Hx, N, D] -> [B, H, blocks]`, in fp32 or better.

    A token of zeros has the cosine 0 with every token. Arguments as in `block_mean`; `centred` subtracts the mean of
    all tokens of a head first.
    """
    x = x if index is None else gather_rows.reference(x, index)
    (B, H, N, D), dtype = x.shape, torch.promote_types(x.dtype, torch.float32)
    centre = x.mean(2, keepdim=True, dtype=dtype) if centred else None
    step = max(1, _WORKSPACE // (B * H * block * D)) * block
    similarity = []
    for start in range(-lead, N, step):
        part = _token_by_token(x[:, :, max(start, 0) : start + step]).to(dtype)
        part = part if centre is None else part - centre
        length = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
        unit = part / length.masked_fill(length == 0, 1.0)
        mean = block_mean.reference(unit, block, max(-start, 0), False, None)  # [B, H, blocks, D]
        similarity.append(mean.square().sum(-1).clamp(max=1.0))
    return torch.cat(similarity, dim=-1)


def _token_by_token(x: Tensor) -> Tensor:
    """`x` with the tokens of a head one behind another, since PyTorch adds other layouts up in an order that varies."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()

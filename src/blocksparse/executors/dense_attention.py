"""Dense attention by the fastest kernel that PyTorch has, for calls that select no blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad, scaled_dot_product_attention

from blocksparse.precision import without_autocast

# Queries whose weights `_by_rows` holds at a time: about as many numbers as the keys that it holds anyway.
_ROWS = 128


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention of `q` `[B, Hq, M, D]` over all of `k` `[B, Hkv, N, D]` and `v`: `[B, Hq, M, Dv]`.

    When causal, the queries are the last ones of the keys. Takes cuDNN where that can run, else FlashAttention-2,
    else the memory-efficient kernel, and plain products of a few queries at a time where PyTorch has no kernel.
    So memory grows with M + N, not with M N, for every dtype, group of heads and head dim. PyTorch's own choice
    is another: its order can be changed for the whole process only, and where no kernel takes the inputs as they
    are it holds all weights. What the caller switched off (`sdpa_kernel`, `torch.backends.cuda`) is not taken.
    """
    with without_autocast(q):
        return _attend(q, k, v, causal=causal, scale=scale)


def _chunk_mask(M: int, N: int) -> Any:
    from torch.nn.attention.bias import causal_lower_right  # brings Dynamo, which takes long to import

    return causal_lower_right(M, N)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    M, N, Dv = q.shape[2], k.shape[2], v.shape[3]
    chunk = causal and M < N  # where PyTorch's flag would align the first query with the first key
    q, k, v = (_loadable(x, x.shape[3]) for x in (q, k, v))
    if not chunk and can_use_cudnn_attention(_params(q, k, v, causal)):
        # 1.7 times as fast as FlashAttention-2 on an H200.
        out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, causal, scale=scale
        )[0]
        return out[..., :Dv]
    width = max(q.shape[3], v.shape[3])
    q, k, v = (_loadable(x, width) for x in (q, k, v))
    if q.device.type == "cpu":
        if chunk:
            return _chunk_on_a_cpu(q, k, v, scale)[..., :Dv]
    elif not can_use_flash_attention(_params(q, k, v, causal and not chunk)):
        k, v = _for_each_query_head(k, q), _for_each_query_head(v, q)
        if not can_use_efficient_attention(_params(q, k, v, causal and not chunk)):
            return _by_rows(q, k, v, causal=causal, scale=scale)[..., :Dv]
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_chunk_mask(M, N) if chunk else None,
        is_causal=causal and not chunk,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )[..., :Dv]


def _params(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> SDPAParams:
    """A call without mask and dropout, for PyTorch to say whether a kernel can run it."""
    return SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])


def _loadable(x: Tensor, width: int) -> Tensor:
    """`x` in `width` columns, rounded up to a multiple of 8, whose tokens kernels can load by 16 bytes at a time.

    Columns of zeros are added, which change no product; in the output they are cut off. Copies where it must.
    """
    missing = -(-width // 8) * 8 - x.shape[3]
    if missing:
        return pad(x.contiguous(), (0, missing))
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(step % 8 for step in x.stride()[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """`x` `[B, Hkv, N, D]` with a copy of a head for each of its query heads, `[B, Hq, N, D]`."""
    size = q.shape[1] // x.shape[1]
    return x if size == 1 else x.repeat_interleave(size, dim=1)


def _chunk_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last M of N tokens, M < N: attention to the keys before them, and causal attention to their own, merged.

    The kernel takes a mask instead, but that has M N entries, and a key that is NaN reaches queries before it.
    """
    earlier = k.shape[2] - q.shape[2]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, lse_before = attend(q, k[:, :, :earlier], v[:, :, :earlier], scale=scale)
    own, lse_own = attend(q, k[:, :, earlier:], v[:, :, earlier:], is_causal=True, scale=scale)
    share = torch.sigmoid(lse_before - lse_own).unsqueeze(-1)
    merged: Tensor = torch.lerp(own.to(share.dtype), before.to(share.dtype), share)
    return merged.to(q.dtype)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """The same in plain products, for `k` and `v` `[B, Hq, N, D]`: float64 on a GPU, and other devices."""
    M, N = q.shape[2], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(wide).transpose(2, 3), v.to(wide)
    position = torch.arange(N, device=q.device)
    out = torch.empty_like(q)
    for start in range(0, M, _ROWS):
        stop = min(start + _ROWS, M)
        end = N - M + stop if causal else N  # none of these queries sees a key from here on
        logits = torch.matmul(q[:, :, start:stop].to(wide), keys[..., :end]).mul_(scale)
        if causal:
            logits.masked_fill_(position[:end] > position[N - M + start : end].unsqueeze(1), float("-inf"))
        out[:, :, start:stop] = torch.matmul(logits.softmax(-1), values[:, :, :end])
    return out

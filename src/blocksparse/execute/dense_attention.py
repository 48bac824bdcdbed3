"""Dense attention by the fastest kernel of PyTorch, for calls that select no blocks."""

from __future__ import annotations

import logging
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

from blocksparse.execute.auto import AutoExecutor
from blocksparse.execute.cpu import takes_dense
from blocksparse.grid import Grid
from blocksparse.kernels.attention.cpu_attention import dense_cpu_attention
from blocksparse.kernels.gemm.products import rounds_fp32
from blocksparse.launch.launch_graph import refuse_capture
from blocksparse.launch.torch_modes import without_autocast
from blocksparse.order.permutation import GlobalPermutation
from blocksparse.select.block_mask import BlockMask
from blocksparse.spec import AttentionSpec

_log = logging.getLogger(__name__)

# `_by_rows` holds the weights of so many queries at a time: about as many numbers as its copy of the keys.
_ROWS = 128
# The lse up to which fp32 holds it to 3e-5. Beyond, parts of a row are merged in float64.
_LARGE_LSE = 1024.0
_BLOCK = 128  # tokens of the blocks of attention that PyTorch has no kernel for


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, because: str = "it was asked for"
) -> Tensor:
    """Softmax attention of `q` `[B, Hq, M, D]` over all of `k` `[B, Hkv, N, D]` and `v`: `[B, Hq, M, Dv]`.

    When causal, the queries are the last M of the N tokens. It runs cuDNN if possible, else FlashAttention-2, else
    the memory-efficient kernel. If PyTorch has no kernel, it runs plain products of a few queries at a time. So
    memory grows with M + N, not with M N, for every dtype, number of heads and head dim. PyTorch's own choice is
    not used for two reasons. Its order can be changed only for the whole process, and it holds all weights if no
    kernel takes the inputs as they are. On a CPU it runs the compiled kernel of `CpuExecutor` where that is faster
    than PyTorch's. Backends that the caller switched off (`sdpa_kernel`, `torch.backends.cuda`) are not run.

    PyTorch's kernels know no sliding window, no softcap and no sinks. So calls with a softcap, with sinks, or with
    a window that hides something run the executor of `AutoExecutor`, with every block that a query sees. The time
    of a window grows with M times its tokens.

    Args:
        because: what the log says of the reason.
    """
    _log.debug("dense attention runs: %s", because)
    refuse_capture("dense attention follows the switches of PyTorch")
    causal, scale = spec.causal, spec.scale
    if not spec.is_plain or (spec.window is not None and spec.window < k.shape[2]):
        mask = everything(q, k, spec, k.shape[1], q_block=_BLOCK, k_block=_BLOCK)
        with without_autocast(q):  # the executor of a sparse call holds no logits
            return AutoExecutor()(q, k, v, mask, spec).out
    if scale <= 0:
        # PyTorch's kernels hide keys before they scale, and -inf would become NaN, or the greatest logit.
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    with without_autocast(q):
        if takes_dense(q, k, v):
            return dense_cpu_attention(q, k, v, causal=causal, scale=scale)[0]
        if q.dtype == torch.float32 and q.device.type == "cpu" and rounds_fp32():
            # PyTorch's kernel would round, too.
            return _attend(q.double(), k.double(), v.double(), causal=causal, scale=scale).float()
        return _attend(q, k, v, causal=causal, scale=scale)


def everything(q: Tensor, k: Tensor, spec: AttentionSpec, heads: int, *, q_block: int, k_block: int) -> BlockMask:
    """The mask of what dense attention visits, for `heads` heads: all that is visible in original order."""
    grid = Grid.of(q, k, GlobalPermutation(), spec, q_block=q_block, k_block=k_block)
    return BlockMask(grid.visible.expand(grid.batch, heads, -1, -1), grid)


def _chunk_mask(M: int, N: int) -> Any:
    from torch.nn.attention.bias import causal_lower_right  # this imports Dynamo, which takes long

    return causal_lower_right(M, N)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    M, N, Dv = q.shape[2], k.shape[2], v.shape[3]
    chunk = causal and M < N  # PyTorch's `is_causal` would align the first query with the first key here
    q, k, v = (_loadable(x, x.shape[3]) for x in (q, k, v))
    # A PyTorch for GPUs raises if it is asked about cuDNN where there is none.
    if q.is_cuda and not chunk and can_use_cudnn_attention(_params(q, k, v, causal)):
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
    mask, gqa, causal = _chunk_mask(M, N) if chunk else None, q.shape[1] != k.shape[1], causal and not chunk
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out[..., :Dv]


def _params(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> SDPAParams:
    """A call without mask and dropout, described for the functions that say if a kernel of PyTorch can run it."""
    return SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])


def _loadable(x: Tensor, width: int) -> Tensor:
    """`x` with columns of zeros up to a multiple of 8, so that kernels can load 16 bytes at a time."""
    missing = -(-width // 8) * 8 - x.shape[3]
    if missing:
        return pad(x.contiguous(), (0, missing))
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(step % 8 for step in x.stride()[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """`x` `[B, Hkv, N, D]` with each head repeated for each of its query heads, `[B, Hq, N, D]`."""
    size = q.shape[1] // x.shape[1]
    return x if size == 1 else x.repeat_interleave(size, dim=1)


def _chunk_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last M of N tokens, M < N, merged from two calls.

    One call attends to the keys before these tokens, the other causally to the keys of these tokens. The kernel
    would also take a mask, but that has M N entries, and a key that is NaN would reach queries before it.
    """
    earlier = k.shape[2] - q.shape[2]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, lse_before = attend(q, k[:, :, :earlier], v[:, :, :earlier], scale=scale)
    own, lse_own = attend(q, k[:, :, earlier:], v[:, :, earlier:], is_causal=True, scale=scale)
    share = torch.sigmoid(lse_before - lse_own).unsqueeze(-1)
    merged: Tensor = torch.lerp(own.to(share.dtype), before.to(share.dtype), share).to(q.dtype)
    size = torch.maximum(lse_before, lse_own).abs()
    large = (size > _LARGE_LSE) & (size < float("inf"))
    if size.dtype != torch.float64 and bool(large.any()):
        wide = _chunk_on_a_cpu(q.double(), k.double(), v.double(), scale).to(q.dtype)
        merged = torch.where(large.unsqueeze(-1), wide, merged)
    return merged


def _by_rows(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Dense attention in plain products, `k` and `v` `[B, Hq, N, D]`; for float64 on a GPU, and other devices."""
    M, N = q.shape[2], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(wide).transpose(2, 3), v.to(wide)
    position = torch.arange(N, device=q.device)
    out = torch.empty_like(q)
    for start in range(0, M, _ROWS):
        stop = min(start + _ROWS, M)
        end = N - M + stop if causal else N  # these queries see only keys before this one
        logits = torch.matmul(q[:, :, start:stop].to(wide), keys[..., :end]).mul_(scale)
        if causal:
            logits.masked_fill_(position[:end] > position[N - M + start : end].unsqueeze(1), float("-inf"))
        out[:, :, start:stop] = torch.matmul(logits.softmax(-1), values[:, :, :end])
    return out

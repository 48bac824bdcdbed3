"""Who is measured: each builds a call on the same q, k, v and mask, with its block lists made beforehand."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from benchmarks.timing import Call, CannotRunError
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.execute.launched import BlockPlan
from blocksparse.kernels.attention.sparse_attention import sparse_attention
from blocksparse.kernels.common.hardware import hardware_of
from blocksparse.kernels.common.tiles import Tiles, portable, tuned

Peer = Callable[[Tensor, Tensor, Tensor, bs.BlockMask], Call]
"""`(q, k, v, mask)`: a call that attends to the blocks of `mask`, a causal mask in original order."""

DensePeer = Callable[[Tensor, Tensor, Tensor], Call]
"""`(q, k, v)`: a call that attends to everything, causally."""

OURS, PORTABLE, FLEX, FA4 = "TritonExecutor", "portable", "FlexAttention", "FA4"


def kernel_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: bs.BlockMask,
    *,
    permutation: bs.GlobalPermutation | None = None,
    tiles: Tiles | None = None,
    spec: bs.AttentionSpec | None = None,
) -> Call:
    """Our kernel; where keys are permuted, they are gathered beforehand too."""
    executor, grid = bs.TritonExecutor(tiles), mask.grid
    spec = spec or bs.AttentionSpec(scale=q.shape[-1] ** -0.5)
    if reasons := executor.unsupported(q, k, v, mask, spec):
        raise CannotRunError("; ".join(reasons))

    order, plan = permutation or bs.GlobalPermutation(), BlockPlan.of(mask)
    tokens = order.gather_queries(q), order.gather_keys(k), order.gather_keys(v)
    tiles = tiles or tuned(*tokens, grid.q_block, grid.k_block)
    run = functools.partial(
        sparse_attention, *tokens, plan, grid.positions, tiles, scale=spec.scale, change=spec.for_kernel(q)
    )
    return lambda: order.restore(run()[0])


def portable_call(
    q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, *, spec: bs.AttentionSpec | None = None
) -> Call:
    """Our kernel for any GPU that Triton compiles for, also where there is a faster one."""
    head_dim = max(q.shape[-1], v.shape[-1])
    tiles = portable(mask.grid.q_block, mask.grid.k_block, head_dim, q.element_size(), hardware_of(q))
    return kernel_call(q, k, v, mask, tiles=tiles, spec=spec)


def flex_call(
    q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, *, spec: bs.AttentionSpec | None = None
) -> Call:
    """PyTorch's compiled FlexAttention, static shapes, and the plain `mask_mod` that it needs on a GPU."""
    from torch.nn.attention import flex_attention as flex

    if spec is not None and spec.sinks is not None:
        raise CannotRunError("FlexAttention knows no sinks")
    window, softcap = (None, None) if spec is None else (spec.window, spec.softcap)
    plan, grid = BlockPlan.of(mask), mask.grid
    block_mask = flex.BlockMask.from_kv_blocks(
        plan.partial_count,
        plan.partial_index,
        plan.full_count,
        plan.full_index,
        BLOCK_SIZE=(grid.q_block, grid.k_block),
        mask_mod=_causal if window is None else _in_window(window),
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    compiled, score_mod = _compiled_flex(), None if softcap is None else _capped(softcap)

    def call() -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=64):  # each length and head dim compiles once
            out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True, score_mod=score_mod)
        return out

    return call


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _in_window(window: int) -> Callable[..., Tensor]:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    return seen


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)


def flash_attention_4_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> Call:
    """flash-attn-4's block-sparse forward."""
    if reasons := bs.FlashAttention4Executor().unsupported(
        q, k, v, mask, bs.AttentionSpec(scale=q.shape[-1] ** -0.5)
    ):
        raise CannotRunError("; ".join(reasons))
    from flash_attn.cute import flash_attn_func

    from blocksparse.execute.packages import to_flash_attention_4
    from blocksparse.kernels.attention.flash_attention_4_mask import causal

    lists = to_flash_attention_4(mask)
    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def call() -> Tensor:
        out: Tensor = flash_attn_func(*turned, block_sparse_tensors=lists, mask_mod=causal)[0]
        return out.transpose(1, 2)

    return call


SPARSE: dict[str, Peer] = {
    OURS: kernel_call,
    PORTABLE: portable_call,
    FLEX: flex_call,
    FA4: flash_attention_4_call,
}


def peer_from(path: Path) -> Peer:
    """One more peer: the function `call(q, k, v, mask)` of a Python file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer: Peer = module.call
    return peer


def sdpa_call(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Dense causal attention by one backend of `scaled_dot_product_attention`.

    Where it takes no grouped heads, keys and values are repeated beforehand, outside the time.
    """

    def call(k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    group = q.shape[1] // k.shape[1]
    try:
        call(k, v, group > 1)
    except RuntimeError:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return lambda: call(k, v, False)
    return lambda: call(k, v, group > 1)


def flash_attention_4_dense_call(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """flash-attn-4's dense causal forward."""
    from flash_attn.cute import flash_attn_func

    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def call() -> Tensor:
        out: Tensor = flash_attn_func(*turned, causal=True)[0]
        return out.transpose(1, 2)

    return call


def cudnn_chunk_call(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Dense attention of the last queries by cuDNN: to the keys before them, and causally to their own, merged.

    PyTorch aligns a causal call's first query with the first key, so there is no single call.
    """
    attend, scale = torch.ops.aten._scaled_dot_product_cudnn_attention, q.shape[-1] ** -0.5
    earlier = k.shape[2] - q.shape[2]
    before, own = ([x[:, :, part] for x in (k, v)] for part in (slice(earlier), slice(earlier, None)))

    def call() -> Tensor:
        out, lse = attend(q, *before, None, True, 0.0, False, scale=scale)[:2]
        own_out, own_lse = attend(q, *own, None, True, 0.0, True, scale=scale)[:2]
        share = torch.sigmoid(lse - own_lse).reshape(*q.shape[:3], 1)
        return torch.lerp(own_out.float(), out.float(), share).to(q.dtype)

    return call


def flash_attention_2_chunk_call(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Dense attention of the last queries as PyTorch's `causal_lower_right` runs it."""
    scale = q.shape[-1] ** -0.5
    return functools.partial(dense_attention, q, k, v, bs.AttentionSpec(scale=scale))


DENSE: dict[str, DensePeer] = {
    "cuDNN dense": functools.partial(sdpa_call, SDPBackend.CUDNN_ATTENTION),
    "FA2 dense": functools.partial(sdpa_call, SDPBackend.FLASH_ATTENTION),
    "FA4 dense": flash_attention_4_dense_call,
}
DENSE_CHUNK: dict[str, DensePeer] = {
    "cuDNN dense": cudnn_chunk_call,
    "FA2 dense": flash_attention_2_chunk_call,
    "FA4 dense": flash_attention_4_dense_call,
}
"""As `DENSE`, where the queries are the last ones of more keys."""

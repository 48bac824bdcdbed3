"""The backend for GPUs on a CPU: vLLM's FlashAttention classes as they are, around kernels in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import KVCacheLayout

flash_attn.get_flash_attn_version = lambda *_, **__: 2

from blocksparse.hosts.vllm import cuda  # noqa: E402, which reads the version


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    **_: Any,
) -> None:
    """Dense attention of packed queries `[tokens, Hq, D]` to pages `[pages, page_size, Hkv, D]`."""
    assert causal
    for row, tokens in enumerate(seqused_k.tolist()):
        start, stop = cu_seqlens_q[row : row + 2].tolist()
        pages = block_table[row, : -(-tokens // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:tokens].transpose(0, 1)[None] for x in (k, v))
        seen = torch.arange(tokens) <= torch.arange(tokens - (stop - start), tokens)[:, None]
        some = scaled_dot_product_attention(
            q[start:stop].transpose(0, 1)[None], keys, values, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        out[start:stop] = some[0].transpose(0, 1)


flash_attn.flash_attn_varlen_func = flash_attn_varlen_func


class Impl(cuda.Impl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        real = slot_mapping >= 0
        page, slot = slot_mapping[real] // kv_cache.shape[2], slot_mapping[real] % kv_cache.shape[2]
        kv_cache[page, :, slot] = torch.cat((key, value), -1)[: len(slot_mapping)][real]


class Backend(cuda.Backend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # the platform takes no other

    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> Any:
        return [16]  # smaller than the pages of the engine, so that these are split


class TokensFirst(Backend):
    """The same with tokens before heads in a page."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

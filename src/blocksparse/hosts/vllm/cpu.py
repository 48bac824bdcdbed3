"""The backend on a CPU, in the place of vLLM's own, because its CPU platform takes no name of a backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from blocksparse.hosts.vllm.builder import SplitBatches
from blocksparse.hosts.vllm.impl import SparsePrefill

_IN_ROWS = ("vec", "vec16")  # kernels of vLLM that keep values by token, and keys by number of the head dim


class Impl(SparsePrefill, CPUAttentionBackendImpl):  # type: ignore[misc]  # vLLM is not there when types are checked
    needs_configuration = False  # without a configuration vLLM's own backend runs

    def unreadable(self, layer: Any) -> str | None:
        isa = getattr(layer, "isa", None)  # which vLLM says after its trial runs; those read no cache
        return None if isa is None or isa in _IN_ROWS else f"keys packed for {isa}"

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """A page of a head holds its keys `[D, page_size]`, and behind them its values `[page_size, D]`."""
        pages, heads, page_size, width = kv_cache.shape
        keys, values = kv_cache.view(pages, heads, 2, page_size * (width // 2)).unbind(2)
        return keys.unflatten(2, (-1, page_size)).transpose(2, 3), values.unflatten(2, (page_size, -1))


class Builder(SplitBatches, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    stock = CPUAttentionMetadataBuilder


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

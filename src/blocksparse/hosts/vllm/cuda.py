"""The backend on a GPU: sparse prompts, and FlashAttention as vLLM has it for everything else."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from blocksparse.hosts.vllm.builder import SplitBatches
from blocksparse.hosts.vllm.impl import SparsePrefill


class Impl(SparsePrefill, FlashAttentionImpl):  # type: ignore[misc]  # vLLM is not there when types are checked
    pass


class Builder(SplitBatches, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    stock = FlashAttentionMetadataBuilder


class Backend(FlashAttentionBackend):  # type: ignore[misc]
    """The attention backend that vLLM finds under the name BLOCKSPARSE."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's own name of the place that `register` gives the name BLOCKSPARSE

    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # which blocks are kept depends on where a prompt is cut into chunks

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a batch is split by the lengths that the host knows

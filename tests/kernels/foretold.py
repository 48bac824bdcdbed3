"""What the library says that a launch takes: by it tiles are chosen, and it is compared with what the compiler reports."""

from __future__ import annotations

from typing import Any

from blocksparse.kernels.attention import gather_attention_triton
from blocksparse.kernels.common.hardware import Hardware, of_attention
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.kernels.gemm import pooled_sums_triton, strided_products_triton
from blocksparse.kernels.order import segments_triton
from blocksparse.kernels.score import last_queries_triton


def foretold(hardware: Hardware, name: str, has: dict[str, Any], itemsizes: list[int]) -> int | None:
    """Bytes of shared memory, at most; None of a kernel whose tiles are small.

    Args:
        name: `sparse_attention_triton._kernel`.
        has: constants of the kernel and options of the launch.
        itemsizes: bytes of an entry of each tensor, in order.
    """
    module = name.partition(".")[0]
    if module == "sparse_attention_triton":
        _, of_key, of_value, of_output, *_ = itemsizes
        rows = has["BLOCK_D"] * of_key, has["BLOCK_DV"] * of_value
        return of_attention(hardware, has, *rows, of_value, has["BLOCK_DV"] * of_output)
    if module == "sparse_attention_hopper":
        tiles = HopperTiles(has["CONSUMERS"], has["BLOCK_N"], has["STAGES"])
        return tiles.needed(has["DQ"], has["DV"], has["Q_BUFFERS"], has["OUT_PARTS"], 2, 2)
    itemsize = itemsizes[0]
    if module == "gather_attention_triton":
        return gather_attention_triton.shared_memory(hardware, has, has["BLOCK_D"] * itemsize, itemsize)
    if module in ("segments_triton", "coarse_steps_triton") and "BLOCK_M" in has:
        return segments_triton.shared_memory(hardware, has, has["BLOCK_D"] * itemsize, itemsize)
    if module == "last_queries_triton" and "KEYS" in has:
        options = {"BLOCK_M": has["ROWS"], "BLOCK_N": has["KEYS"], "num_stages": has["num_stages"]}
        return last_queries_triton.shared_memory(hardware, options, has["D"], itemsize, sums="PARTS" in has)
    if module == "pooled_sums_triton":
        pooled = pooled_sums_triton.PooledTiles(
            *(has[x] for x in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
        )
        return pooled_sums_triton.shared_memory(hardware, pooled, has["BLOCK_D"] * itemsize, itemsize, has["WIDE"])
    if module in ("strided_products_triton", "strided_means_triton") and "BLOCK_K" in has:
        cells = (has[x] for x in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"))
        return strided_products_triton.shared_memory(
            hardware, strided_products_triton.ProductTiles(*cells), itemsize
        )
    return None

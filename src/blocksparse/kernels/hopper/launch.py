"""How the two kernels over block lists are launched on Hopper: what they take alike, worked out once."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.kernels.common.device_functions import head_strides
from blocksparse.kernels.common.sizes import REMEMBERED, padded_keys, padded_values
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.kernels.hopper.tile_scheduler import consumer_registers, registers
from blocksparse.kernels.masks.arguments import Lists
from blocksparse.kernels.masks.grid import TokenPositions


@frozen(eq=False)
class Launch:
    """A grid of programs, the arguments that follow a kernel's own, and its constants and options."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def launch_of(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: tuple[int, int],
    lists: Lists,
    positions: TokenPositions,
    tiles: HopperTiles,
    scale: float,
    entries: int | None = None,
) -> Launch:
    """The launch for `q` `[B, Hq, M, D]` and `keys`, the number of KV heads and of keys.

    The queries have their empty places as rows (`whole_rows`). `per_sm` programs run on each multiprocessor, and share
    the tiles of queries through a queue, whose counter is in `arguments`. With `entries` they share a list of work with
    so many entries instead (`hopper/split_kv.py`).
    """
    (B, Hq, M, D), (Hk, N), causal = q.shape, keys, positions.causal
    full_count, index = lists.full_count, lists.index
    rows = full_count.shape[-1] * (lists.q_block // (64 * tiles.consumers))
    work = B * Hq * rows if entries is None else entries
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count * tiles.per_sm
    arguments = (
        lse, full_count, lists.partial_count, index, positions.q_position, positions.k_position,
        q.new_empty(1, dtype=torch.int32).zero_(),  # which takes the host half as long as torch.zeros
        *head_strides(full_count), *head_strides(index), *lse.stride()[:2],
        head_strides(positions.q_position), head_strides(positions.k_position),
        work, M, N, index.shape[-1], rows, Hk, Hq // Hk, Hq // full_count.shape[1],
        N - M if causal else 0, scale * math.log2(math.e),
    )  # fmt: skip
    options = {
        **_options(tiles, lists.q_block, lists.k_block, D, out.shape[-1]),
        "CAUSAL": causal, "Q_IN_ORDER": positions.q_in_order, "K_IN_ORDER": positions.k_in_order,
    }  # fmt: skip
    return Launch((min(programs, work),), arguments, options)


@functools.lru_cache(maxsize=REMEMBERED)  # tiles and sizes of blocks and heads alone decide them
def _options(tiles: HopperTiles, q_block: int, k_block: int, D: int, Dv: int) -> dict[str, int]:
    block_m, piece = 64 * tiles.consumers, min(k_block, tiles.block_n)
    return {
        "DQ": padded_keys(D), "DV": padded_values(Dv),
        "CONSUMERS": tiles.consumers, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        "PIECES": tiles.block_n // piece, "K_SPLIT": k_block // piece, "Q_SPLIT": q_block // block_m,
        "CONSUMER_REGISTERS": consumer_registers(tiles.consumers, tiles.per_sm),
        "num_warps": 4, "maxnreg": registers(tiles.consumers, tiles.per_sm),
    }  # fmt: skip


def whole_rows(q: Tensor, out: Tensor, lse: Tensor, lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q`, `out` and `lse` with `lead` more queries in front.

    The bulk copy engine takes no negative row numbers. So where a chunk starts inside a block, the empty places before
    its first query become rows, and `out` and `lse` are new tensors, to be copied back (`copy_back`).
    """
    if not lead:
        return q, out, lse
    longer = _longer(q, lead)  # by steps that a capture knows, unlike `pad`
    longer[:, :, :lead].zero_()
    longer[:, :, lead:].copy_(q)
    return longer, _longer(out, lead), lse.new_empty(longer.shape[:3])


def _longer(x: Tensor, lead: int) -> Tensor:
    """Uninitialised `[B, H, lead + M, D]`, with tokens before heads in memory where `x` `[B, H, M, D]` has them so."""
    B, H, M, D = x.shape
    if x.stride(2) > x.stride(1):
        return x.new_empty((B, lead + M, H, D)).transpose(1, 2)
    return x.new_empty((B, H, lead + M, D))


def copy_back(longer: tuple[Tensor, Tensor], filled: tuple[Tensor, Tensor], lead: int) -> None:
    """Copy `out` and `lse` of `whole_rows`, less the rows in front, to where the caller wants them."""
    if lead:
        for x, whole in zip(filled, longer, strict=True):
            x.copy_(whole[:, :, lead:])

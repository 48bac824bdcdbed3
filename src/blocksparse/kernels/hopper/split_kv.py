"""Split-KV on Hopper: long lists are split, for launches that have few tiles of queries.

A chunk of a prompt has few tiles of queries, and their lists differ in length. Of the 512 tiles of 2048 queries over 128K
keys, one may keep 569 blocks where the average is 83. A program that walks such a list from end to end then works on when no
other has work left. So where there are few tiles and many keys (`split_kv`), a list of more than `longest` blocks is divided
into equal splits:

    1. `_split` writes a work list, with an entry for each split. A list that is not divided has one entry.
    2. The scheduler of the attention kernel hands out these entries instead of tiles of queries. The result of a list that is
        not divided goes to the output. The result of a split goes to `SplitKV.out` and `SplitKV.sums`, as if that split were
        the whole list.
    3. `_combine` adds up the splits of each list, each weighted by its part of the softmax's denominator. It gets this part as
       a sum of weights and the logit that these are relative to, so that large logits stay exact.

Whether and where a list is divided follows from shapes and from its own length, never from other lists, and nothing is read
back to the host. Splits of the lists with most splits come first in the work list, so that the longest lists begin first and
short ones fill the end of the launch.

An entry of the work list is three int64, which the warp that loads keys hands to the other warps:

    * `item`: the split's first block in its row's list (bits 0 to 23), its full blocks (bits 24 to 43) and its partial
      blocks (bits 44 to 63). Entries after the last one are -1.
    * `coords`: those of the tile of queries, as `pack_coords` of `hopper/tile_scheduler.py` has them.
    * `split slot`: the number of the split's result among all results of splits; -1 if the list is not divided.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from blocksparse.kernels.common.device_functions import head_strides
from blocksparse.kernels.common.sizes import REMEMBERED, cdiv, empty_together, padded_values, power_of_2
from blocksparse.kernels.masks.arguments import Lists
from blocksparse.launch.launches import remembered

# Lists are split if there are so many keys: with fewer, two more launches take the host longer than they save;
_KEYS = 65536
# and if there are so many keys for each row of all tiles of queries: with fewer, all programs have enough to do.
_KEYS_PER_ROW = 2
_SHORTEST = 4096  # keys that a split has room for at least, since its result goes through memory in fp32
_MOST_BYTES = 2**28  # of the results of splits
_MOST_ENTRIES = 4096  # of the work list, which one program writes
_ROWS = 32  # queries that a program of `_combine` adds up
_OF_PROMPT = [
    *("full_count_ptr", "partial_count_ptr", "count_stride_b", "count_stride_h"),
    *("tiles", "most", "longest", "rows"),
]


class _Sizes(NamedTuple):
    """What shapes decide, as both kernels take it."""

    tiles: int  # tiles of queries in the launch
    most: int  # splits of a list at most
    longest: int  # blocks in a split at most
    rows: int  # tiles of queries in a head
    kv_heads: int
    group: int  # query heads that share a KV head
    heads_per_mask: int


@frozen(eq=False)
class SplitKV:
    """The work list of a launch, and where results of splits go."""

    work: Tensor  # [3, entries] int64: items, coordinates and split slots
    out: Tensor  # [entries, queries, DV] fp32, DV being the padded head dim of values
    sums: Tensor  # [entries, 2, queries] fp32: the reference of each query's weights, in base 2, and their sum
    lists: Lists
    sizes: _Sizes
    tile: int  # queries in a tile of queries

    @property
    def entries(self) -> int:
        return self.work.shape[1]

    def combine(self, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
        """Write the rows of `out` `[B, Hq, M, Dv]` and of `lse` `[B, Hq, M]` whose lists were split.

        `sinks` `[Hq]` fp32 are one more logit of each query head, which has no value.
        """
        M, Dv = out.shape[2:]
        lists = self.lists
        _combine[(self.sizes.tiles, self.tile // _ROWS)](
            lists.full_count, lists.partial_count, *head_strides(lists.full_count), *self.sizes,
            self.out, self.sums, sinks, out, lse, out.stride()[:3], *lse.stride()[:2], M, Dv,
            Q_SPLIT=lists.q_block // self.tile, TILE=self.tile, DV=self.out.shape[-1], ROWS=_ROWS, num_warps=4,
        )  # fmt: skip


def split_kv(
    batch: tuple[int, int], keys: tuple[int, int], head_dim: int, lists: Lists, tile: int
) -> SplitKV | None:
    """How the lists of a launch are split, or None where they are not.

    Args:
        batch: numbers of batch entries and query heads.
        keys: numbers of KV heads and keys.
        head_dim: that of values.
        tile: queries in a tile of queries.
    """
    counts, DV = lists.full_count, padded_values(head_dim)
    sizes = _sizes(batch, keys, lists.index.shape[1:], lists.q_block, lists.k_block, tile, DV)
    if sizes is None:
        return None
    entries = sizes.tiles * sizes.most
    work = counts.new_empty((3, entries), dtype=torch.int64)
    _split[(1,)](
        counts, lists.partial_count, *head_strides(counts), *sizes, work,
        Q_SPLIT=lists.q_block // tile, ENTRIES=power_of_2(entries), num_warps=8,
    )  # fmt: skip
    out, sums = empty_together(torch.float32, counts.device, (entries, tile, DV), (entries, 2, tile))
    return SplitKV(work, out, sums, lists, sizes, tile)


@functools.lru_cache(maxsize=REMEMBERED)
def _sizes(
    batch: tuple[int, int], keys: tuple[int, int], of_lists: tuple[int, int, int],
    q_block: int, k_block: int, tile: int, DV: int,
) -> _Sizes | None:  # fmt: skip
    """What shapes decide, `of_lists` being `[Hm, rows, cols]` of the lists and `DV` the padded head dim of values."""
    (B, Hq), (Hk, N), (Hm, blocks, cols) = batch, keys, of_lists
    rows = blocks * (q_block // tile)
    tiles = B * Hq * rows
    entries = min(_MOST_BYTES // (4 * tile * DV), _MOST_ENTRIES)
    if max(_KEYS, _KEYS_PER_ROW * tiles * tile) > N or entries < 2 * tiles:
        return None
    longest = max(cdiv(cols, entries // tiles), cdiv(_SHORTEST, k_block))
    return _Sizes(tiles, cdiv(cols, longest), longest, rows, Hk, Hq // Hk, Hq // Hm)


@triton.jit
def _list_of(
    tile, full_count_ptr, partial_count_ptr, count_stride_b, count_stride_h, longest, rows, kv_heads, group, heads_per_mask,
    there, Q_SPLIT: tl.constexpr,
):  # fmt: skip
    """Batch entry, query head, KV head, row, full and partial blocks and splits of tiles, numbered as `tile_coords` does."""
    key = tile // (rows * group)
    within = tile % (rows * group)
    b, h_key = key // kv_heads, key % kv_heads
    h, row = h_key * group + within % group, rows - 1 - within // group
    at = b.to(tl.int64) * count_stride_b + (h // heads_per_mask).to(tl.int64) * count_stride_h + row // Q_SPLIT
    full = tl.load(full_count_ptr + at, mask=there, other=0)
    partial = tl.load(partial_count_ptr + at, mask=there, other=0)
    return b, h, h_key, row, full, partial, tl.maximum(tl.cdiv(full + partial, longest), 1)


@remembered
@triton.jit(do_not_specialize=_OF_PROMPT)
def _split(
    full_count_ptr, partial_count_ptr, count_stride_b, count_stride_h,
    tiles, most, longest, rows, kv_heads, group, heads_per_mask,
    work_ptr,
    Q_SPLIT: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the work list, in one program.

    Entry `i` of `most * tiles` possible ones is split `most - 1 - i // tiles` of the list of tile `i % tiles`. Its split slot
    is `i` too. Those that exist move up to the front.
    """
    entry = tl.arange(0, ENTRIES)
    split, tile = most - 1 - entry // tiles, entry % tiles
    b, h, h_key, row, full, partial, splits = _list_of(
        tile, full_count_ptr, partial_count_ptr, count_stride_b, count_stride_h, longest, rows, kv_heads, group,
        heads_per_mask, split >= 0, Q_SPLIT,
    )  # fmt: skip
    exists = (split >= 0) & (split < splits)
    blocks = full + partial
    # Fewer than 2^19 blocks, and at most 2^12 splits: the products fit an int32.
    first, end = blocks * split // splits, blocks * (split + 1) // splits
    full = tl.minimum(tl.maximum(full - first, 0), end - first)
    partial = end - first - full
    item = first.to(tl.int64) | (full.to(tl.int64) << 24) | (partial.to(tl.int64) << 44)
    coords = (b.to(tl.int64) << 48) | (h.to(tl.int64) << 32) | (h_key.to(tl.int64) << 16) | row
    split_slot = tl.where(splits > 1, entry, -1).to(tl.int64)
    entries = most * tiles
    to = work_ptr + tl.cumsum(exists.to(tl.int32), 0) - 1
    tl.store(to, item, mask=exists)
    tl.store(to + entries, coords, mask=exists)
    tl.store(to + 2 * entries, split_slot, mask=exists)
    after = (entry >= tl.sum(exists.to(tl.int32), 0)) & (entry < entries)
    nothing = tl.zeros([ENTRIES], tl.int64)
    tl.store(work_ptr + entry, nothing - 1, mask=after)
    tl.store(work_ptr + entries + entry, nothing, mask=after)
    tl.store(work_ptr + 2 * entries + entry, nothing - 1, mask=after)


@remembered
@triton.jit(do_not_specialize=[*_OF_PROMPT, "lse_stride_b", "lse_stride_h"])
def _combine(
    full_count_ptr, partial_count_ptr, count_stride_b, count_stride_h,
    tiles, most, longest, rows, kv_heads, group, heads_per_mask,
    split_out_ptr, split_sums_ptr, sinks_ptr, out_ptr, lse_ptr, out_strides, lse_stride_b, lse_stride_h, M, D,
    Q_SPLIT: tl.constexpr, TILE: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of `ROWS` queries of one tile; a program whose tile's list was not split has nothing to do."""
    tile = tl.program_id(0)
    b, h, _, row, _, _, splits = _list_of(
        tile, full_count_ptr, partial_count_ptr, count_stride_b, count_stride_h, longest, rows, kv_heads, group,
        heads_per_mask, True, Q_SPLIT,
    )  # fmt: skip
    if splits > 1:
        of_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        query, dim = row * TILE + of_tile, tl.arange(0, DV)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for split in range(splits):
            split_slot = (most - 1 - split) * tiles + tile
            top = tl.maximum(top, tl.load(split_sums_ptr + 2 * split_slot * TILE + of_tile))
        sink = float("-inf")
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + h) * 1.4426950408889634  # log2(e)
            top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)  # a reference is finite, also where a query sees no key
        sums = tl.zeros([ROWS, DV], tl.float32)
        for split in range(splits):
            split_slot = (most - 1 - split) * tiles + tile
            at = 2 * split_slot * TILE + of_tile
            weight = tl.load(split_sums_ptr + at + TILE) * tl.exp2(tl.load(split_sums_ptr + at) - top)
            total += weight
            at = (split_slot * TILE + of_tile).to(tl.int64)
            sums += weight[:, None] * tl.load(split_out_ptr + at[:, None] * DV + dim[None, :])
        seen = total != 0.0
        total = tl.where(seen, total, 1.0)
        sums = sums / total[:, None]
        at = b.to(tl.int64) * lse_stride_b + h.to(tl.int64) * lse_stride_h + query
        log_sum = (top + tl.log2(total)) * 0.6931471805599453  # ln 2
        tl.store(lse_ptr + at, tl.where(seen, log_sum, float("-inf")), mask=query < M)
        at = b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
        at += query.to(tl.int64)[:, None] * out_strides[2] + dim[None, :]
        tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=(query < M)[:, None] & (dim < D)[None, :])

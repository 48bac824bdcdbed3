"""Tokens and channels are moved: rows by an index map, pages of a cache, channels of a rotary band.

`gather_rows` and `scatter_rows` move tokens: rows of a tensor are read through an index map, or written through it.

    gather   out[b, h, i] = x[b, h // (H / Hx), index[b, h, i]]
    scatter  out[b, h, index[b, h, i]] = x[b, h, i]

One launch reads every row and every index once. Blocks of rows that are not needed need not be moved.

`gather_pages` reads the keys and values of one request from the pages of a cache.

    k[0, h, t] = keys[pages[t // page_size], h, t % page_size], and v likewise

One launch does it, which reads the table itself, whatever strides the cache has.

`band_channels` takes the channels of a band of rotary pairs from mean queries and mean keys, with a temperature for each
query head. Channel `i` and channel `i + D / 2` are a pair; `first` and `end` count pairs.

    share        = 2 (end - first) / D
    smaller(x)   = rms(x[band]) / rms(x)
    temperature  = sqrt(share) smaller(mean queries) smaller(mean keys)

`rms` is over all blocks of a head and the channels, and `smaller` is at least `LEAST_RMS`. Queries are divided by the
temperature, or by the one that is given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blocksparse.kernels.common.dispatch import on_gpus
from blocksparse.launch.torch_modes import without_autocast


@on_gpus()
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` `[B, Hx, N, D]` that `index` `[B, H, M]` int32 names, `[B, H, M, D]`; `Hx` divides `H`."""
    # One head after another: `index_select` copies whole rows, and takes any strides.
    (B, H, M), group = index.shape, index.shape[1] // x.shape[1]
    rows = [x[b, h // group].index_select(0, index[b, h]) for b in range(B) for h in range(H)]
    with without_autocast(x):  # autocast refuses to join tensors of another half precision than its own
        return torch.stack(rows).view(B, H, M, x.shape[-1])


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` `[B, H, N, D]` that `index` `[B, H, M]` names in each head, by PyTorch on every device."""
    rows: Tensor = x.gather(2, index.long().unsqueeze(-1).expand(*index.shape, x.shape[-1]))
    return rows


@on_gpus()
def gather_two(
    x: Tensor, y: Tensor, index: Tensor, wanted: Tensor | None = None, block: int = 1
) -> tuple[Tensor, Tensor]:
    """`gather_rows` of `x` `[B, Hx, N, D]` and `y` `[B, Hx, N, Dy]` in one launch.

    Args:
        wanted: `[B|1, Hw, blocks]` bool, which blocks of `block` rows of the result anyone reads. `Hw` divides `H`. Rows
            of the others may hold anything, and on GPUs they are not written. None for all.
    """
    return gather_rows.reference(x, index), gather_rows.reference(y, index)


@on_gpus()
def scatter_rows(x: Tensor, index: Tensor) -> Tensor:
    """Undo a gather of as many rows: `x` `[B, H, M, ...]` and `index` `[B, H, M]` int32, each row named once."""
    place = inverse(index).long()
    return x.gather(2, place.view(*place.shape, *[1] * (x.ndim - 3)).expand(x.shape))


def inverse(index: Tensor) -> Tensor:
    """The map that undoes `index` along its last axis, int32."""
    slots = torch.arange(index.shape[-1], dtype=torch.int32, device=index.device).expand(index.shape)
    return torch.empty_like(slots, memory_format=torch.contiguous_format).scatter_(-1, index.long(), slots)


@on_gpus()
def gather_pages(keys: Tensor, values: Tensor, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Write `k` `[1, Hkv, N, D]` and `v` `[1, Hkv, N, Dv]`.

    Args:
        keys: the cache of one layer, `[pages, Hkv, page_size, D]`.
        values: `[pages, Hkv, page_size, Dv]`.
        pages: `[at least ceil(N / page_size)]` int32 or int64, contiguous. Pages of the request in order.
    """
    N, page_size = k.shape[2], keys.shape[2]
    used = pages[: -(-N // page_size)].long()
    for cache, out in ((keys, k), (values, v)):
        out.copy_(cache[used].transpose(0, 1).flatten(1, 2)[None, :, :N])


LEAST_RMS = 1e-6


@on_gpus(torch.float32, where=lambda queries, keys, *_: keys.dtype == torch.float32)
def band_channels(
    queries: Tensor, keys: Tensor, first: int, end: int, temperature: float | None
) -> tuple[Tensor, Tensor]:
    """`[B, Hq, rows, D]` and `[B, H, cols, D]` to `[..., 2 (end - first)]`; `H` divides `Hq`."""
    mine, its = (x.unflatten(3, (2, -1))[..., first:end].flatten(3) for x in (queries, keys))
    if temperature is not None:
        return mine / temperature, its
    share = 2 * (end - first) / queries.shape[3]
    smaller = _smaller(queries, mine) * _smaller(keys, its).repeat_interleave(
        queries.shape[1] // keys.shape[1], dim=1
    )
    return mine / (math.sqrt(share) * smaller), its


def _smaller(whole: Tensor, part: Tensor) -> Tensor:
    """The root mean square of `part` over that of `whole`, for each head, `[B, H, 1, 1]`."""
    of_whole, of_part = (x.square().mean((2, 3), keepdim=True).sqrt() for x in (whole, part))
    return (of_part / of_whole.clamp_min(LEAST_RMS)).clamp_min(LEAST_RMS)

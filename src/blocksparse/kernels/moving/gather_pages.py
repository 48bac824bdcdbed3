"""Read the keys and values of one request from the pages of a cache.

    k[0, h, t] = keys[pages[t // page_size], h, t % page_size], and v likewise

On GPUs one launch does it, which reads the table itself, whatever strides the cache has.
"""

from __future__ import annotations

from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus


@on_gpus()
def gather_pages(keys: Tensor, values: Tensor, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Write `k` `[1, Hkv, N, D]` and `v` `[1, Hkv, N, Dv]`.

    Args:
        keys: the cache of one layer, `[pages, Hkv, page_size, D]`.
        values: `[pages, Hkv, page_size, Dv]`.
        pages: `[at least ceil(N / page_size)]` int32 or int64, contiguous, the pages of the request in order.
    """
    N, page_size = k.shape[2], keys.shape[2]
    used = pages[: -(-N // page_size)].long()
    for cache, out in ((keys, k), (values, v)):
        out.copy_(cache[used].transpose(0, 1).flatten(1, 2)[None, :, :N])

"""Some channels of mean queries and mean keys, those of a band of rotary pairs, with a temperature for each query head.

Channel `i` and channel `i + D / 2` are a pair; `first` and `end` count pairs.

    share        = 2 (end - first) / D
    smaller(x)   = rms(x[band]) / rms(x), over all blocks of a head and the channels; at least `LEAST_RMS`
    temperature  = sqrt(share) smaller(mean queries) smaller(mean keys), unless it is given

Queries are divided by it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blocksparse.kernels.common.twins import on_gpus

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

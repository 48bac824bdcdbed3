"""The Triton kernel of `coarse_order` that orders what is kept, and the launch of all four."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.coarse_choice_triton import TILE, choose, row_of_maps
from blocksparse.kernels.coarse_order import STEPS
from blocksparse.kernels.coarse_steps_triton import ROWS_AT_ONCE, coarse_steps
from blocksparse.kernels.hardware import device_of

BYTES_AT_ONCE = 3 << 26  # of steps and kept keys
WIDE, NARROW = 1024, 64  # kept keys at a time, to count and to order


def coarse_order_triton(mean: Tensor, k: Tensor, first: int, S: int, out: Tensor) -> None:
    """Launch the kernels; arguments as of `coarse_order`."""
    B, H, G, count = out.shape
    if count == 0:
        return
    mean, k = mean.to(k.dtype), k if k.stride(-1) == 1 else k.contiguous()
    at_once = max(1, BYTES_AT_ONCE // (B * H * ((first + G) * S + 4 * count)))
    whole = max(1, ROWS_AT_ONCE * k.shape[1] // H)  # segments whose rows fill a tile
    at_once = at_once // whole * whole or at_once
    with device_of(k):
        for g in range(0, G, at_once):
            some = slice(g, min(g + at_once, G))
            _some_segments(mean[:, :, some], k, first + g, S, out[:, :, some])


def _some_segments(mean: Tensor, k: Tensor, first: int, S: int, out: Tensor) -> None:
    B, H, G, count = out.shape
    steps = coarse_steps(mean, k, first, S)  # [B, H, G, width]
    kept = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    grid = (B * H * G,)
    choose[grid](
        steps, steps.view(torch.int32), kept, first, S, H, G, steps.shape[-1], count,
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    _order[grid](
        kept, out, out.stride(), first, S, H, G, count,
        STEPS=STEPS, WIDE=WIDE, NARROW=NARROW, num_warps=1,
    )  # fmt: skip


@triton.jit
def _order(
    kept_ptr, out_ptr, out_strides, first, S, H, G, count,
    STEPS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Kept keys by step, stable: a counting sort."""
    b, h, g, start, want = row_of_maps(H, G, first, S, count)
    kept_at = kept_ptr + ((b * H + h).to(tl.int64) * G + g) * count
    out_at = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_at + g.to(tl.int64) * out_strides[2]
    wide, narrow = tl.arange(0, WIDE), tl.arange(0, NARROW)

    number = tl.zeros([STEPS], tl.int32)
    for at in range(0, want, WIDE):
        there = wide < want - at
        number += tl.histogram((tl.load(kept_at + at + wide, mask=there, other=0) >> 24) & 255, STEPS, mask=there)
    following = tl.cumsum(number, 0) - number  # the slot of the next key of each step
    for at in range(0, want, NARROW):
        there = narrow < want - at
        kept = tl.load(kept_at + at + narrow, mask=there, other=0)
        step = (kept >> 24) & 255
        same = (step[:, None] == step[None, :]) & (narrow[:, None] > narrow[None, :])
        slot = tl.gather(following, step, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(out_at + slot, kept & 0xFFFFFF, mask=there)
        following += tl.histogram(step, STEPS, mask=there)
    for at in range(want, count, WIDE):
        tl.store(out_at + at + wide, wide * 0 - 1, mask=wide < count - at)

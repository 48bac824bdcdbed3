"""Operands of 8-bit attention on Hopper: queries, keys and values, quantized to 8 bits on their way into slots.

A tile here is 64 or 128 consecutive slots. In a matrix product on Hopper four threads share a row of scores. Thread `t` of
them holds the columns `i` with `i % 8 // 2 == t` (`hopper/rows.py`). The slots `i` of a tile with the same `t` are a
*group*. Keys and values are stored twice. Heads 0 to H - 1 have a scale per group, and serve tiles that a query sees whole.
Heads H to 2H - 1 have a scale per token, and serve masked tiles, so that no row depends on a later token. An index of -1 is
an empty slot, which gets zeros.

Queries and keys are rotated first, `x @ H / sqrt(D)` with `H[i, j] = (-1)^popcount(i & j)`. Their products stay what they
are, and rounding errs by about a third less, since a large entry is spread over all.

A token with an infinity or a NaN makes its own scale NaN, and that of its group, whose tokens then all become NaN; other
tokens do not change. One launch reads every token once.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import FLOATS, on_gpus
from blocksparse.kernels.common.hardware import hardware_of
from blocksparse.kernels.gemm.products import products
from blocksparse.kernels.quantize.tokens import (
    FP8_LIMIT,
    GROUP,
    LEAST_LOG2,
    in_slot_order,
    int8_per_block,
    int8_per_token,
)


def _rotates_on_chip(x: Tensor, *_: object, **__: object) -> bool:
    # Elsewhere the rotation of fp32 takes more registers and shared memory than there are.
    return x.dtype != torch.float32 or hardware_of(x).multiplies_from_shared


@frozen(eq=False)
class TileOperands:
    """All that the kernel reads of queries, keys and values. H is Hkv or Hq."""

    q: Tensor  # [B, Hq, M, D] int8
    k: Tensor  # [B, 2 * H, N, D] int8
    v: Tensor  # [B, 2 * H, D, N up to a multiple of 16] fp8, or as they were, [B, H, N, D]
    q_scale: Tensor  # [B, Hq, M] fp32
    k_tile_scale: Tensor  # [B, H, tiles, 4] fp32
    k_token_scale: Tensor  # [B, H, N] fp32
    v_tile_log2: Tensor | None = None  # [B, H, tiles, 4] fp32; None where v is not fp8
    v_token: Tensor | None = None  # [B, 2 * H, N] fp32: log2 of scales, then their inverses
    taken: Tensor | None = None  # [B, Hq, M] fp32: by how much a query's logits fall when keys lose their mean


@on_gpus(*FLOATS, where=_rotates_on_chip)
def int8_query_tiles(
    q: Tensor, index: Tensor | None, mean: Tensor | None = None, scale: float = 1.0, early: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rotated int8 `[B, Hq, M, D]` of `q` in slot order, scales `[B, Hq, M]` fp32, and what `mean` takes, `[B, Hq, M]`.

    Args:
        q: `[B, Hq, M, D]`.
        index: `[B, Hq|1, M]` int32, the query in each slot. None leaves queries in place.
        mean: `[B, Hkv, D]` fp32, subtracted from the keys. Every logit of a query drops by `scale * q . mean`, with the
            query as it was rounded.
        scale: factor from products to logits.
        early: queries of `q` before this one lose 0.
    """
    index = None if index is None else index.expand(*q.shape[:2], -1)
    values, q_scale = int8_per_token(rotated(in_slot_order(q, index)))
    if mean is None:
        return values, q_scale, None
    taken = scale * q_scale * products(values.float(), rotated(mean).unsqueeze(2)).squeeze(-1)
    token = torch.arange(q.shape[2], device=q.device) if index is None else index
    return values, q_scale, taken.masked_fill(token < early, 0.0)


@on_gpus(*FLOATS, where=_rotates_on_chip)
def int8_key_tiles(
    k: Tensor, index: Tensor | None, tile: int, mean: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated int8 `[B, 2 * H, slots, D]` of `k`, scales of groups `[B, H, tiles, 4]` and of tokens `[B, H, slots]` fp32.

    Args:
        k: `[B, Hkv, N, D]`. `Hkv` divides `H`.
        index: `[B, H, slots]` int32, the key in each slot. None leaves keys in place.
        tile: slots per tile.
        mean: `[B, Hkv, D]` fp32. It is subtracted from the keys that have a scale per group.
    """
    plain = smooth = rotated(in_slot_order(k, index))
    if mean is not None:
        smooth = plain - rotated(mean).repeat_interleave(plain.shape[1] // mean.shape[1], 1).unsqueeze(2)
        smooth = smooth if index is None else smooth.masked_fill((index < 0).unsqueeze(-1), 0.0)
    groups = _by_group(smooth, tile)
    values, scale = int8_per_block(groups.flatten(2, 4), tile // 4)
    tile_scale = scale.view(groups.shape[:-1])[..., 0]
    plain_values, token_scale = int8_per_token(plain)
    in_slots = _by_slot(values.view(groups.shape), plain.shape[2])
    return torch.cat((in_slots, plain_values), 1), tile_scale, token_scale


@on_gpus(*FLOATS)
def fp8_value_tiles(v: Tensor, index: Tensor | None, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """`v` in fp8 `[B, 2 * H, D, slots]`, log2 of groups' scales `[B, H, tiles, 4]`, and of tokens' `[B, 2 * H,
    slots]`, fp32.

    Values are `[D, slots]`, as Hopper's 8-bit products want their second operand, with zeros up to a multiple of 16 slots.
    Every 16 slots stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. Weights that the product of queries and keys
    left in a thread's registers then are where the product with values takes them (`operands_of` in `hopper/int8.py`
    derives this). Logarithms stay in the order of slots. Those of tokens are heads 0 to H - 1, and the inverses of the same
    scales are heads H to 2H - 1.

    Args:
        v: `[B, Hkv, N, D]`. `Hkv` divides `H`.
        index: `[B, H, slots]` int32, the value in each slot. None leaves values in place.
        tile: slots per tile.
    """
    v = in_slot_order(v, index).float()
    slots = v.shape[2]
    groups = _by_group(v, tile)
    tile_scale, token_scale = _fp8_scale(groups.abs().amax((-2, -1))), _fp8_scale(v.abs().amax(-1))
    parts = _by_slot(groups * (1 / tile_scale)[..., None, None], slots), v * (1 / token_scale).unsqueeze(-1)
    values = torch.cat(parts, 1).to(torch.float8_e4m3fn).view(torch.uint8)
    # [B, 2 * H, slots / 16, 2, 4, 2, D]: slot 8 i + 2 j + k of 16 goes to place 4 j + 2 i + k
    values = pad(values, (0, 0, 0, -slots % GROUP)).unflatten(2, (-1, 2, 4, 2))
    values = values.permute(0, 1, 6, 2, 4, 3, 5).flatten(3).contiguous()
    of_tokens = torch.cat((token_scale.log2(), 1 / token_scale), 1)
    return values.view(torch.float8_e4m3fn), tile_scale.log2(), of_tokens


def rotated(x: Tensor) -> Tensor:
    """`x` `[..., D]` times the Hadamard matrix over `sqrt(D)`, in fp32; twice it gives `x` again."""
    D = x.shape[-1]
    sign = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    while len(sign) < D:
        sign = torch.cat((torch.cat((sign, sign), 1), torch.cat((sign, -sign), 1)))
    # `products` takes rows of its second operand; the matrix is symmetric, so its rows are its columns.
    turned: Tensor = products(x.float().reshape(1, 1, -1, D), sign[None, None]).view(x.shape) * D**-0.5
    return turned


def _by_group(x: Tensor, tile: int) -> Tensor:
    """`[B, H, slots, D]` as `[B, H, tiles, 4, tile / 4, D]`, with zeros in the last tile."""
    x = pad(x, (0, 0, 0, -x.shape[2] % tile)).unflatten(2, (-1, tile // 8, 4, 2))
    return x.transpose(3, 4).flatten(4, 5)


def _by_slot(x: Tensor, slots: int) -> Tensor:
    """Undo `_by_group`: `[B, H, tiles, 4, tile / 4, D]` as `[B, H, slots, D]`."""
    tokens: Tensor = x.unflatten(4, (-1, 2)).transpose(3, 4).flatten(2, 5)
    return tokens[:, :, :slots]


def _fp8_scale(largest: Tensor) -> Tensor:
    # The divisor is a tensor because on a GPU torch would turn division by a number into a product with its inverse.
    scale = largest / largest.new_full((), FP8_LIMIT)
    return scale.masked_fill(largest == torch.inf, torch.nan).clamp_min(2.0**LEAST_LOG2)

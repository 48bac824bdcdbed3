"""The launches of `int8_query_tiles`, `int8_key_tiles` and `fp8_value_tiles`: one each, which reads every token once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse.kernels.common.hardware import converts_to_fp8
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.common.strides_triton import alike
from blocksparse.kernels.rounding import tile_rotation_triton, tile_values_triton
from blocksparse.kernels.rounding.quantize import GROUP

_STEPS = 32  # rounds of a program that rotates, at most about; it makes the Hadamard matrix once for all of them


def int8_query_tiles_triton(
    q: Tensor, index: Tensor | None, mean: Tensor | None = None, scale: float = 1.0, early: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; arguments as of `int8_query_tiles`."""
    B, H, M, D = q.shape
    values = torch.empty((B, H, M, D), dtype=torch.int8, device=q.device)
    q_scale = torch.empty((B, H, M), dtype=torch.float32, device=q.device)
    taken = None if mean is None else torch.empty_like(q_scale)
    index = None if index is None else index.expand(B, H, -1)
    _launch(tile_rotation_triton.query_kernel, q, index, mean, values, q_scale, taken, None, D**-0.5, scale, early)
    return values, q_scale, taken


def int8_key_tiles_triton(
    k: Tensor, index: Tensor | None, tile: int, mean: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as of `int8_key_tiles`."""
    D = k.shape[-1]
    B, H, slots = k.shape[:3] if index is None else index.shape
    values = torch.empty((B, 2 * H, slots, D), dtype=torch.int8, device=k.device)
    tile_scale, token_scale = _scales(k, B, H, H, slots, tile)
    _launch(tile_rotation_triton.key_kernel, k, index, mean, values, tile_scale, token_scale, tile, D**-0.5)
    return values, tile_scale, token_scale


def fp8_value_tiles_triton(v: Tensor, index: Tensor | None, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as of `fp8_value_tiles`."""
    B, H, slots = v.shape[:3] if index is None else index.shape
    wide = cdiv(slots, GROUP) * GROUP
    values = torch.empty((B, 2 * H, v.shape[-1], wide), dtype=torch.uint8, device=v.device)
    tile_log2, of_tokens = _scales(v, B, H, 2 * H, slots, tile)
    _launch(
        tile_values_triton.value_kernel, v, index, None, values.view(torch.int32), tile_log2, of_tokens, tile,
        HARDWARE=converts_to_fp8(v),
    )  # fmt: skip
    return values.view(torch.float8_e4m3fn), tile_log2, of_tokens


def rows_of(head_dim: int, *, rotates: bool, queries: bool) -> tuple[int, int]:
    """How many slots a program holds at a time, for keys and values one or two tiles; and its warps."""
    if queries:
        return 64, 4
    return 128, 4 if rotates else max(head_dim // 16, 4)


def options_of(warps: int, itemsize: int, *, cuda: bool = True) -> dict[str, int]:
    """Options of a launch. With three stages the next tokens are loaded while these are rotated; with two none are."""
    return {"num_warps": warps, "num_stages": 3 if itemsize == 2 and cuda else 2}


def _resident(x: Tensor, queries: bool) -> int:
    """How many programs that rotate run at a time."""
    per_multiprocessor = 3 if queries else 4
    if not x.is_cuda:
        return per_multiprocessor
    return per_multiprocessor * torch.cuda.get_device_properties(x.device).multi_processor_count


def _scales(x: Tensor, B: int, H: int, of_tokens: int, slots: int, tile: int) -> tuple[Tensor, Tensor]:
    """Uninitialised scales of groups for `H` heads, and of tokens for `of_tokens` heads."""
    tile_scale = torch.empty((B, H, cdiv(slots, tile), 4), dtype=torch.float32, device=x.device)
    return tile_scale, torch.empty((B, of_tokens, slots), dtype=torch.float32, device=x.device)


def _launch(
    kernel: Any, x: Tensor, index: Tensor | None, mean: Tensor | None, values: Tensor,
    scale: Tensor, second: Tensor | None, tile: int | None, *numbers: float, **constants: bool,
) -> None:  # fmt: skip
    """Launch `kernel`. `numbers` are the last arguments of a kernel that rotates, and empty for one that does not."""
    if x.shape[-1] not in (64, 128) or tile not in (64, 128, None):
        raise ValueError(f"head dims and tiles are 64 or 128, not {x.shape[-1]} and {tile}")
    B, H, slots = x.shape[:3] if index is None else index.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if index is not None and index.stride(-1) != 1:
        index = index.contiguous()
    D, means = x.shape[-1], () if mean is None else (mean.contiguous(), H // mean.shape[1])
    rows, warps = rows_of(D, rotates=bool(numbers), queries=tile is None)
    parts, steps = cdiv(slots, rows), 1
    if numbers:
        at_once = _resident(x, tile is None)
        times = cdiv(parts * B * H, at_once * _STEPS)
        steps = cdiv(parts, max(at_once * times // (B * H), 1))
        numbers = (steps, *numbers)
    options = options_of(warps, x.element_size(), cuda=torch.version.hip is None)
    tiles = {} if tile is None else {"TILE": tile}
    kernel[(cdiv(parts, steps), H, B)](
        x, index, *(means or (None, 1)), values, scale, second,
        x.stride()[:3], None if index is None else alike(*index.stride()[:2]), slots, H // x.shape[1], *numbers,
        D=D, ROWS=rows, **tiles, **constants, **options,
    )  # fmt: skip

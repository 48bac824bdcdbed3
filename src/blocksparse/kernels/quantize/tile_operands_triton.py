"""The launches of `int8_query_tiles`, `int8_key_tiles` and `fp8_value_tiles`, and the Triton kernel of the last."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blocksparse.kernels.common.device_functions import alike
from blocksparse.kernels.common.hardware import converts_to_fp8
from blocksparse.kernels.common.sizes import cdiv
from blocksparse.kernels.quantize import tile_rotation_triton
from blocksparse.kernels.quantize.tile_rotation_triton import inverse_of, of_groups, of_tokens, store_groups
from blocksparse.kernels.quantize.tokens import FP8_LIMIT, GROUP, LEAST_LOG2
from blocksparse.kernels.quantize.tokens_triton import fp8_bits, largest_of, read_tokens, scale_of
from blocksparse.launch.launches import remembered

_FP8_LIMIT = tl.constexpr(FP8_LIMIT)
_LEAST = tl.constexpr(2.0**LEAST_LOG2)


@triton.jit
def _fp8_scale(largest):
    scale = scale_of(largest, _FP8_LIMIT)
    return tl.where(scale < _LEAST, _LEAST, scale)


@triton.jit
def _values_at(source, slot, inside, at, inverse_at, D: tl.constexpr):
    """Values in slots, their largest entries, and the inverses of their scales; stores these, and the scales' logarithms."""
    x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source = source
    x, there = read_tokens(x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source, slot, inside, D, D)
    largest = largest_of(x)
    scale = _fp8_scale(largest)
    inverse = inverse_of(scale)
    tl.store(at, tl.log2(scale), mask=inside)
    tl.store(at + inverse_at, tl.reshape(inverse, slot.shape), mask=inside)
    return x, largest, inverse


@triton.jit
def _codes(x0, x1, x2, x3, HARDWARE: tl.constexpr):
    """Four numbers rounded to fp8, as the bytes of an int32, that of `x0` lowest."""
    if HARDWARE:
        # One instruction rounds two numbers. These are numbers that stay neighbours, so that no byte has to move.
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        codes = fp8_bits(x0).to(tl.int32) | fp8_bits(x1).to(tl.int32) << 8
        codes |= fp8_bits(x2).to(tl.int32) << 16 | fp8_bits(x3).to(tl.int32) << 24
    return codes


@remembered
@triton.jit(do_not_specialize=["slots"])
def value_kernel(
    x_ptr, index_ptr, mean_ptr, heads_per_mean, values_ptr, tile_log2_ptr, of_tokens_ptr, x_strides, index_strides,
    slots, heads_per_source, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    H = tl.num_programs(1)
    head = b.to(tl.int64) * H + h
    # Four neighbouring places hold slots of one group: `slot`, and those 1, 8 and 9 later (`fp8_value_tiles` has the order).
    # Their bytes make one int32, so the transposition moves them together.
    four = tl.program_id(0) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    slot = four // 4 * 16 + four % 4 * 2
    left, at = slots - slot, of_tokens_ptr + (head + b.to(tl.int64) * H) * slots + slot
    further = H.to(tl.int64) * slots
    source = x_ptr, x_strides, index_ptr, index_strides, b, h, heads_per_source
    x0, largest0, inverse0 = _values_at(source, slot, left > 0, at, further, D)
    x1, largest1, inverse1 = _values_at(source, slot + 1, left > 1, at + 1, further, D)
    x2, largest2, inverse2 = _values_at(source, slot + 8, left > 8, at + 8, further, D)
    x3, largest3, inverse3 = _values_at(source, slot + 9, left > 9, at + 9, further, D)
    largest = tl.maximum(tl.maximum(largest0, largest1), tl.maximum(largest2, largest3))
    tile_scale = _fp8_scale(of_groups(largest, ROWS // 4, TILE // 4, 1))
    store_groups(tile_log2_ptr, tl.log2(tile_scale), head, tl.program_id(0), slots, ROWS, TILE)
    inverse = inverse_of(of_tokens(tile_scale, ROWS // 4, TILE // 4, 1))
    down = tl.arange(0, D)[:, None]
    fours = tl.cdiv(slots, 16) * 4
    for copy in tl.static_range(2):
        if copy == 1:
            codes = _codes(x0 * inverse0, x1 * inverse1, x2 * inverse2, x3 * inverse3, HARDWARE)
        else:
            codes = _codes(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse, HARDWARE)
        values_at = values_ptr + (((b.to(tl.int64) * 2 + copy) * H + h) * D + down) * fours + four[None, :]
        tl.store(values_at, tl.trans(codes), mask=(four < fours)[None, :])


_STEPS = 32  # rounds of a program that rotates, at most about; it makes the Hadamard matrix once for all of them


def int8_query_tiles_triton(
    q: Tensor, index: Tensor | None, mean: Tensor | None = None, scale: float = 1.0, early: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel; arguments as in `int8_query_tiles`."""
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
    """Launch the kernel; arguments as in `int8_key_tiles`."""
    D = k.shape[-1]
    B, H, slots = k.shape[:3] if index is None else index.shape
    values = torch.empty((B, 2 * H, slots, D), dtype=torch.int8, device=k.device)
    tile_scale, token_scale = _scales(k, B, H, H, slots, tile)
    _launch(tile_rotation_triton.key_kernel, k, index, mean, values, tile_scale, token_scale, tile, D**-0.5)
    return values, tile_scale, token_scale


def fp8_value_tiles_triton(v: Tensor, index: Tensor | None, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments as in `fp8_value_tiles`."""
    B, H, slots = v.shape[:3] if index is None else index.shape
    wide = cdiv(slots, GROUP) * GROUP
    values = torch.empty((B, 2 * H, v.shape[-1], wide), dtype=torch.uint8, device=v.device)
    tile_log2, of_tokens = _scales(v, B, H, 2 * H, slots, tile)
    _launch(
        value_kernel, v, index, None, values.view(torch.int32), tile_log2, of_tokens, tile,
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

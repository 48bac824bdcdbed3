"""What a consumer on Hopper writes when a tile of queries is done: 64 rows of the output, and their log-sum-exp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocksparse.kernels.attention.hopper_loaders import PANEL


@gluon.jit
def store_lse(lse_ptr, strides, b, h, row, M, log2_sum, whole, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Stores the log-sum-exp of logits in base e, from that in base 2; -inf where the sum of weights, `whole`, is 0."""
    log_sum = log2_sum * 0.6931471805599453  # ln 2
    log_sum = gl.where(whole == 0.0, float("-inf"), log_sum)
    query = (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=ROW)
    lse_at = b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    gl.store(lse_ptr + lse_at + query, log_sum, mask=query < M)


@gluon.jit
def store_out(out_target, out_pieces, out_bufs, sums, whole, b, h, row, WG: gl.constexpr, C):
    """Starts to copy the weighted mean of values to the output, part by part, through shared memory.

    It returns before the copies have read that memory: `store_wait` ahead of the next part, be it of this tile of queries
    or of the next one, and at the end of the kernel, waits for them.
    """
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    inverse = gl.where(whole == 0.0, 0.0, 1.0 / whole)
    result = (sums * gl.convert_layout(inverse, OUT_ROW)[:, None]).to(out_pieces.dtype)
    if C.OUT_PARTS == 1:
        _store_part(out_target, out_pieces, out_bufs, result, 0, b, h, row, WG, C)
    else:
        left, right = result.reshape([64, 2, C.DV // 2]).permute([0, 2, 1]).split()
        _store_part(out_target, out_pieces, out_bufs, left, 0, b, h, row, WG, C)
        _store_part(out_target, out_pieces, out_bufs, right, 1, b, h, row, WG, C)


@gluon.jit
def _store_part(
    out_target, out_pieces, out_bufs, result, part: gl.constexpr, b, h, row, WG: gl.constexpr, C,
):  # fmt: skip
    """Starts to copy part `part` of the output's columns, panel by panel, once the part before has left shared memory."""
    PANELS: gl.constexpr = C.DV // C.OUT_PARTS // PANEL
    tma.store_wait(0)
    out_bufs.index(WG).store(result)
    fence_async_shared()
    for panel in gl.static_range(PANELS):
        tma.async_copy_shared_to_global(
            out_target,
            [b, h, (row * C.CONSUMERS + WG) * 64, (part * PANELS + panel) * PANEL],
            out_pieces.index(WG * PANELS + panel),
        )

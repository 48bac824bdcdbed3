"""What a consumer on Hopper writes when a tile of queries is done: 64 rows of the output, and their log-sum-exp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocksparse.kernels.common.names_triton import bulk_store
from blocksparse.kernels.hopper.loaders import PANEL


@gluon.jit
def _queries(row, WG: gl.constexpr, C, ROW: gl.constexpr):
    """The numbers of a consumer's queries, in a head whose tile of queries is `row`."""
    return (row * C.CONSUMERS + WG) * 64 + gl.arange(0, 64, layout=ROW)


@gluon.jit
def _log_sum(log2_sum, whole):
    """The log-sum-exp of logits in base e, from that in base 2; -inf where the sum of weights, `whole`, is 0."""
    return gl.where(whole == 0.0, float("-inf"), log2_sum * 0.6931471805599453)  # ln 2


@gluon.jit
def _mean(sums, whole):
    """The weighted mean of values; 0 where the sum of weights is 0, even where a value is not finite."""
    whole = gl.convert_layout(whole, gl.SliceLayout(1, sums.type.layout))
    return gl.where((whole == 0.0)[:, None], 0.0, sums * (1.0 / whole)[:, None])


@gluon.jit
def store_share_sums(sums_ptr, target, reference, whole, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Stores a share's sums of weights and what they are relative to; `target` is its number among all shares' results.

    Their logarithm would lose as much as fp32 rounds a logit by.
    """
    gl.store(sums_ptr + _queries(2 * target, WG, C, ROW), reference)
    gl.store(sums_ptr + _queries(2 * target + 1, WG, C, ROW), whole)


@gluon.jit
def store_share(out_ptr, sums, whole, target, WG: gl.constexpr, C):
    """Stores the weighted mean of a share's values in fp32."""
    LAYOUT: gl.constexpr = sums.type.layout
    dim = gl.arange(0, C.DV, layout=gl.SliceLayout(0, LAYOUT))
    at = _queries(target, WG, C, gl.SliceLayout(1, LAYOUT))[:, None] * C.DV + dim[None, :]
    gl.store(out_ptr + at, _mean(sums, whole))


@gluon.jit
def store_lse(lse_ptr, strides, b, h, row, M, log2_sum, whole, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Stores the log-sum-exp of a tile of queries (`_log_sum`)."""
    query = _queries(row, WG, C, ROW)
    lse_at = b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    gl.store(lse_ptr + lse_at + query, _log_sum(log2_sum, whole), mask=query < M)


@gluon.jit
def store_out(out_target, out_pieces, out_bufs, sums, whole, b, h, row, WG: gl.constexpr, C):
    """Starts to copy the weighted mean of values to the output, part by part, through shared memory.

    It returns before the copies have read that memory. `store_wait` waits for them ahead of the next part, of this tile of
    queries or of the next one, and at the end of the kernel.
    """
    result = _mean(sums, whole).to(out_pieces.dtype)
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
        bulk_store(
            out_target,
            [b, h, (row * C.CONSUMERS + WG) * 64, (part * PANELS + panel) * PANEL],
            out_pieces.index(WG * PANELS + panel),
        )

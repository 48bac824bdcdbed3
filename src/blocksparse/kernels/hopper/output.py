"""What a consumer on Hopper writes when a tile of queries is done: 64 rows of the output, and their log-sum-exp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocksparse.kernels.common.names_triton import bulk_store
from blocksparse.kernels.hopper.loaders import BOX_COLS


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
def store_split_sums(given, split_slot, reference, whole, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Stores a split's sums of weights and what they are relative to.

    Their logarithm would lose as much as fp32 rounds a logit by.
    """
    gl.store(given.pointers.split_sums + _queries(2 * split_slot, WG, C, ROW), reference)
    gl.store(given.pointers.split_sums + _queries(2 * split_slot + 1, WG, C, ROW), whole)


@gluon.jit
def store_split(given, sums, whole, split_slot, WG: gl.constexpr, C):
    """Stores the weighted mean of a split's values in fp32."""
    LAYOUT: gl.constexpr = sums.type.layout
    dim = gl.arange(0, C.DV, layout=gl.SliceLayout(0, LAYOUT))
    at = _queries(split_slot, WG, C, gl.SliceLayout(1, LAYOUT))[:, None] * C.DV + dim[None, :]
    gl.store(given.pointers.split_out + at, _mean(sums, whole))


@gluon.jit
def store_lse(given, b, h, row, log2_sum, whole, WG: gl.constexpr, C, ROW: gl.constexpr):
    """Stores the log-sum-exp of a tile of queries (`_log_sum`)."""
    query = _queries(row, WG, C, ROW)
    strides = given.strides.lse
    lse_at = b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    gl.store(given.pointers.lse + lse_at + query, _log_sum(log2_sum, whole), mask=query < given.sizes.M)


@gluon.jit
def store_out(given, out_bufs, sums, whole, b, h, row, WG: gl.constexpr, C):
    """Starts to copy the weighted mean of values to the output, part by part, through shared memory.

    It returns before the copies have read that memory. `store_wait` waits for them ahead of the next part, of this tile of
    queries or of the next one, and at the end of the kernel.
    """
    result = _mean(sums, whole).to(given.buffers.out.dtype)
    if C.OUT_PARTS == 1:
        _store_part(given, out_bufs, result, 0, b, h, row, WG, C)
    else:
        left, right = result.reshape([64, 2, C.DV // 2]).permute([0, 2, 1]).split()
        _store_part(given, out_bufs, left, 0, b, h, row, WG, C)
        _store_part(given, out_bufs, right, 1, b, h, row, WG, C)


@gluon.jit
def _store_part(given, out_bufs, result, part: gl.constexpr, b, h, row, WG: gl.constexpr, C):
    """Starts to copy part `part` of the output's columns, box by box, once the part before has left shared memory."""
    BOXES: gl.constexpr = C.DV // C.OUT_PARTS // BOX_COLS
    tma.store_wait(0)
    out_bufs.index(WG).store(result)
    fence_async_shared()
    for box in gl.static_range(BOXES):
        bulk_store(
            given.descriptors.out,
            [b, h, (row * C.CONSUMERS + WG) * 64, (part * BOXES + box) * BOX_COLS],
            given.buffers.out.index(WG * BOXES + box),
        )

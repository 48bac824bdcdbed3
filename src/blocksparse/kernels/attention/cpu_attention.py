"""Softmax attention over kept blocks by a kernel that this machine compiles for its CPU.

    out[b, h, i] = sum_j softmax_j(scale * q[b, h, i] . k[b, h // G, j]) v[b, h // G, j]

over the keys `j` in the slots of the blocks that the row of query `i` keeps, without those that causality or a sliding
window hides by original position. Nothing is moved: the kernel reads keys, values and queries, and writes outputs, where
they stand. `gather_attention_reference` is the reference implementation in plain torch.

Every part of a row of blocks, 128 queries at most, is attended to by one thread, which takes it from a counter that all
share. So the result does not depend on the number of threads, to the bit. A call looks for signals every 50 ms, so that
Ctrl-C ends a long one.

bf16 is multiplied as it is where the CPU does that (AVX-512 BF16, AMX), with weights rounded to bf16. On other CPUs bf16 is
widened to fp32, and so is fp16 on all. All sums and the softmax are in fp32.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from blocksparse.kernels.attention.sparse_attention import UNCHANGED
from blocksparse.kernels.common.compiled import TYPES, Call, Loaded, load, python_calls, steps, team
from blocksparse.kernels.common.sizes import empty_as
from blocksparse.kernels.masks.arguments import LogitChange, RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.launch.torch_private import operations_are_noted

SOURCE = Path(__file__).with_suffix(".cpp")
MAX_HEAD_DIM = 256

_log = logging.getLogger(__name__)


@frozen(eq=False)
class Kept:
    """Which blocks each row of blocks attends to."""

    keep: Tensor  # [B, H, rows, cols] bool; H divides Hq
    q_block: int
    k_block: int


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    positions: TokenPositions,
    *,
    scale: float,
    change: LogitChange = UNCHANGED,
    skip: float | None = None,
    taken: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` `[B, Hq, M, Dv]` of the dtype of v, and `lse` `[B, Hq, M]` fp32, in original order.

    Args:
        q: `[B, Hq, M, D]`, for which `cpu_kernel_refuses` has no reasons. In original order, like `k` `[B, Hkv, N, D]`
            and `v` `[B, Hkv, N, Dv]`.
        skip: below 0. A query leaves out a block if the block's greatest logit lies more than this below the greatest one of
            earlier blocks. Only blocks that the row sees whole count. Only where `may_skip`.
        taken: `[B, Hq, rows, cols]` bool, contiguous, the blocks that are kept. Those that all queries of their row leave
            out are cleared.
        out: where the output is written, with its last axis innermost. If None, it lies in memory as `empty_as` has it.
    """
    call = _call_of(positions, kept.q_block, kept.k_block, *kept.keep.shape[2:])
    call.set(keep=kept.keep, keep_heads=kept.keep.shape[1], keep_step=steps(kept.keep, 4), skip=skip, taken=taken)
    return _attend(call, q, k, v, scale, positions.causal, positions.window, change, out)


def may_skip(kept: Kept, positions: TokenPositions) -> bool:
    """Whether the kernel leaves out blocks: it cuts its own tiles, and a row is one task."""
    return kept.q_block <= 128 and kept.k_block in (32, 64, 96, 128) and positions.group_of_row is None


def dense_cpu_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention by the CPU kernel; when causal, queries are the last M of the N tokens."""
    call, rows, cols = Call(SOURCE, "Call"), -(-q.shape[2] // 128), -(-k.shape[2] // 128)
    call.set(q_block=128, k_block=128, rows=rows, cols=cols)
    return _attend(call, q, k, v, scale, causal, None, UNCHANGED, None)


def cpu_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, lists: RankedLists, positions: TokenPositions, rule: StopRule, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`gather_attention` by the CPU kernel: rows visit blocks in the order of `lists`, and stop by `rule`."""
    index, opened, count = (x.contiguous() for x in (lists.index, lists.opened, lists.count))
    visited = torch.empty_like(count)
    call = _call_of(positions, lists.q_block, lists.k_block, *index.shape[2:])
    call.set(order=index, opened=opened, count=count, tau=rule.tau.float().contiguous(), visited=visited)
    call.set(patience=rule.patience, commit=rule.commit, mean=rule.mean)
    out, lse = _attend(call, q, k, v, scale, positions.causal, positions.window, UNCHANGED, None)
    return out, lse, visited


def cpu_kernel_refuses(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Every reason why the kernel cannot attend with these; that it is not there is the last one to be looked for."""
    reasons = []
    if any(x.device.type != "cpu" for x in (q, k, v)):
        reasons.append(f"it runs on a CPU, and these tensors are on {q.device.type}")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in TYPES):
        reasons.append(f"it computes float32, bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}")
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        reasons.append(f"it takes head dims up to {MAX_HEAD_DIM}, not {max(q.shape[3], v.shape[3])}")
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, k, v)):
        reasons.append("it takes plain tensors, not subclasses")
    if operations_are_noted():
        reasons.append("it is no operation of PyTorch, and those are being noted")
    if not reasons and (why := cpu_kernel().why_not) is not None:
        reasons.append(why)
    return reasons


@functools.cache
def cpu_kernel() -> Loaded:
    """The compiled kernel, or why there is none; compiled at the first call ever, which takes some seconds.

    If there is none the log says so, once a process.
    """
    found = load(SOURCE)
    if found.why_not is not None:
        _log.warning(
            "attention on this CPU runs without its compiled kernel, which is several times faster: %s",
            found.why_not,
        )
    return found


def cpu_products() -> str:
    """How the kernel multiplies bf16 on this CPU: "AMX", "AVX-512 BF16", or "fp32" if it widens it first."""
    library = cpu_kernel().library
    return "fp32" if library is None else ("fp32", "AVX-512 BF16", "AMX")[library.blocksparse_bf16()]


def _call_of(positions: TokenPositions, q_block: int, k_block: int, rows: int, cols: int) -> Call:
    """A call for blocks of tokens at these positions."""
    call, q_at, k_at = Call(SOURCE, "Call"), positions.q_position, positions.k_position
    # A mask of one row, or of one column, has blocks that may be far longer than the prompt.
    q_block = q_block if rows > 1 else min(q_block, q_at.shape[-1])
    k_block = k_block if cols > 1 else min(k_block, k_at.shape[-1])
    call.set(rows=rows, cols=cols, q_block=q_block, k_block=k_block, lead=positions.q_lead, q_at=q_at, k_at=k_at)
    call.set(
        q_at_heads=q_at.shape[1], q_at_step=steps(q_at, 2), k_at_heads=k_at.shape[1], k_at_step=steps(k_at, 3)
    )
    call.set(map_of_row=positions.group_of_row)
    return call


def _attend(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    change: LogitChange,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fill in the rest of `call`, and make it."""
    (B, Hq, M, D), (_, Hkv, N, _), Dv = q.shape, k.shape, v.shape[3]
    if k.shape != (B, Hkv, N, D) or v.shape[:3] != (B, Hkv, N) or Hq % max(Hkv, 1) or (causal and M > N):
        sizes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        raise ValueError(f"q [B, Hq, M, D], k [B, Hkv, N, D] and v [B, Hkv, N, Dv] must fit each other: {sizes}")
    if out is None:
        out = empty_as(q, Dv, v.dtype)
    lse = q.new_empty((B, Hq, M), dtype=torch.float32)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    # The kernel takes the greatest logit of unscaled ones.
    if scale <= 0:
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    q, k, v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (q, k, v))
    sinks = None if change.sinks is None else change.sinks.float().contiguous()
    call.set(batch=B, q_heads=Hq, kv_heads=Hkv, queries=M, keys=N, dim=D, v_dim=Dv, type=TYPES[q.dtype])
    call.set(causal=causal, window=window, offset=N - M if causal else 0, scale=scale, softcap=change.softcap)
    call.set(q=q, k=k, v=v, out=out, lse=lse, sinks=sinks, signals=python_calls()[2], **team())
    call.set(q_step=steps(q, 3), k_step=steps(k, 3), v_step=steps(v, 3), out_step=steps(out, 3))
    library = cpu_kernel().library
    assert library is not None, "ask cpu_kernel_refuses first"
    call.make(library, "attend", f"for attention of {tuple(q.shape)} to {tuple(k.shape)}")
    return out, lse

"""Softmax over small cells of queries and keys, summed over the cells of each block.

A cell is `slots` consecutive tokens. The logit of a query cell and a key cell is

    weight * sum_r q[s(r)] . k[r]

over its slots `r`, with `s(r) = slots - 1 - r` if `flipped`, else `r`. A query cell spreads a mass of 1 over the key
cells that it reaches; a block holds the mass of its pairs of cells. If `joint`, all query cells of a row of blocks spread a
mass of 1 together: there is one softmax over all their pairs.

No kernel keeps the logits. The one for GPUs leaves out blocks that do not fill tiles or shared memory, and sliding windows
over cells of several slots; the one for CPUs leaves out `joint`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocksparse.kernels.common.dispatch import FLOATS, compiled, on_gpus
from blocksparse.kernels.common.sizes import ROOM
from blocksparse.kernels.gemm.products import (
    StridedPooling,
    edge_means,
    fillers,
    products,
    strided_view,
    wide_dtype,
)
from blocksparse.kernels.score import cpu_scores

_WORKSPACE = 2**28  # bytes of logits that are held at a time; their softmax takes as much again
_CPU_WORKSPACE = 2**21  # the same for a causal call on a CPU: short steps make fewer logits that causality hides
_CPU_ROWS = 256  # rows of a product that a step has in any case there, since shorter products are slow


def _fill_tiles(q: Tensor, k: Tensor, of: StridedPooling, **_: object) -> bool:
    if of.wide & (of.wide - 1) or of.wide > 128:
        return False
    if of.slots > 1:  # tokens of a cell
        return not of.windowed and of.wide <= 64
    from blocksparse.kernels.gemm.pooled_sums_triton import pooled_tiles

    return (of.wide <= 64 or q.shape[-1] * q.element_size() <= 512) and pooled_tiles(q, of.wide) is not None


@on_gpus(*FLOATS, where=_fill_tiles)
@compiled(cpu_scores.strided_mass_on_cpu, lambda q, k, of, **_: not of.joint and cpu_scores.takes(q, k))
def strided_mass(
    q: Tensor, k: Tensor, of: StridedPooling, *, weight: float, floor: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Mass of every block, `[B, Hq, rows, cols]` fp32 or better; rows lie on the blocks of the whole prompt.

    Args:
        q: `[B, Hq, M, D]`, in slot order.
        k: `[B, H, N, D]`, in slot order. H divides Hq.
        of: the cells, with the last position of each query cell.
        weight: above 0, as the scales that stages get are.
        floor: the least mass `[B, Hq, rows, cols]`. The result is the greater of it and `factor` times this mass; the
            last of its rows may lack query cells.
    """
    slots, q_lead, causal, q_last, k_first = of.slots, of.q_lead, of.causal, of.q_last, of.k_first
    first_cell, segment = of.first_cell, of.segment
    q_filler, k_filler = fillers(q, k, of, edge_means)
    q_cells, k_cells = strided_view(q, slots, q_lead, q_filler), strided_view(k, slots, 0, k_filler)
    keys = k_cells.flatten(3)  # [B, H, cells, slots * D]
    column = torch.arange(keys.shape[2], device=q.device)
    cell = torch.arange(first_cell, first_cell + q_cells.shape[2], device=q.device)
    in_order, q_floor, k_last = q_last is None, of.q_floor, of.k_last
    if in_order:
        q_last, k_first = ((cell + 1) * of.every - 1).view(1, 1, -1), column.view(1, 1, -1)
        if of.behind is not None:
            q_floor, k_last = q_last - of.behind - 1, k_first

    # A block far larger than the prompt is cut to one that holds all of its cells, and takes no more memory.
    high = min(of.high, max(first_cell + q_cells.shape[2], ROOM))
    wide = min(of.wide, max(keys.shape[2], ROOM))
    empty = first_cell % high  # how many cells row 0 lacks at its start
    held, cols = -(-(empty + q_cells.shape[2]) // high), -(-keys.shape[2] // wide)
    masses = []
    # In a window some rows together look at few keys besides their own, and at no others.
    looked_at = keys.shape[2] if of.behind is None else min(keys.shape[2], 2 * max(of.behind, high * of.every))
    row = q.shape[0] * q.shape[1] * high * looked_at * wide_dtype(q).itemsize  # bytes of a row of blocks
    step = max(1, _WORKSPACE // row)
    if q.device.type == "cpu" and causal and in_order:
        step = min(step, max(_CPU_WORKSPACE // row, -(-_CPU_ROWS // (high * q.shape[1] // k.shape[1]))))
    step = step if of.behind is None else min(step, max(1, of.behind // (high * of.every)))
    for top in range(0, held, step):
        bottom = min(top + step, held)
        first, last = max(top * high - empty, 0), min(bottom * high - empty, q_cells.shape[2])
        end = min((first_cell + last) * of.every, keys.shape[2]) if causal and in_order else keys.shape[2]
        begin = 0 if of.behind is None else min(max((first_cell + first + 1) * of.every - 1 - of.behind, 0), end)
        queries = q_cells[:, :, first:last]
        logits = products((queries.flip(3) if of.flipped else queries).flatten(3), keys[:, :, begin:end]).mul_(
            weight
        )
        eligible = torch.ones(1, 1, last - first, end - begin, dtype=torch.bool, device=q.device)
        if causal and k_first is not None and q_last is not None:
            eligible = k_first[..., begin:end].unsqueeze(2) <= q_last[..., first:last].unsqueeze(3)
        if q_floor is not None and k_last is not None:
            eligible = eligible & (k_last[..., begin:end].unsqueeze(2) > q_floor[..., first:last].unsqueeze(3))
        if segment is not None:
            eligible = eligible & (column[begin:end] < (cell[first:last] // segment * segment).unsqueeze(1))
        before, after = first - (top * high - empty), bottom * high - empty - last  # cells that these rows lack
        mass = _softmax(logits, eligible)
        if of.joint:  # what is not eligible is now -inf
            mass = mass * _shares(logits.logsumexp(-1), high, before, after).unsqueeze(3)
        mass = pad(mass, (begin, cols * wide - end, before, after))
        masses.append(mass.unflatten(3, (cols, wide)).sum(4).unflatten(2, (-1, high)).sum(3))
    return cpu_scores.greater(torch.cat(masses, dim=2), floor, factor)


def _shares(log_sum: Tensor, high: int, before: int, after: int) -> Tensor:
    """The share of each query cell in the weights of its row of `high` cells, `[B, Hq, cells]`, from logs of their sums."""
    rows = pad(log_sum, (before, after), value=float("-inf")).unflatten(2, (-1, high))
    shares = rows.softmax(-1).masked_fill((rows == float("-inf")).all(-1, keepdim=True), 0.0)
    result: Tensor = shares.flatten(2)[:, :, before : before + log_sum.shape[2]]
    return result


def _softmax(logits: Tensor, eligible: Tensor) -> Tensor:
    """Softmax over the eligible cells, in place, `[B, Hq, rows, cols]`; all 0 where no logit is above -inf."""
    grouped, eligible = logits.unflatten(1, (eligible.shape[1], -1)), eligible.unsqueeze(2)
    mass = grouped.masked_fill_(~eligible, float("-inf")).softmax(-1)
    none = grouped.amax(-1, keepdim=True) == float("-inf")
    result: Tensor = mass.masked_fill_(none, 0.0).flatten(1, 2)
    return result

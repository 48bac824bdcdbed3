"""The softmax of the last queries (the probe) over all keys, summed over blocks of keys and over bands of distances.

    columns[b, h, j]  the mean weight that the queries give to the keys of block `j`
    bands[b, h, j]    and to the distances `j run` to `j run + run - 1`

These are `run_sums` of the two results of `probe_lines`, in causal calls without a window. Sums over runs need no weight of a
single key, so each tile of logits is computed once: it gives sums for each query, which are divided by the query's whole sum
when that is known. There is a Triton kernel for GPUs (`probe_sums_triton.py`); who has none sums the lines.
"""

from __future__ import annotations

from torch import Tensor

_RUNS = 64, 128  # shorter runs are tiles too small to be worth it


def probe_sums(
    probe: Tensor,  # [B, Hq, P, D], the last queries
    k: Tensor,  # [B, H, N, D], in original order; H divides Hq
    scale: float,
    run: int,
) -> tuple[Tensor, Tensor] | None:
    """`columns` and `bands`, `[B, Hq, ceil(N / run)]` fp32 each; None where no kernel takes such a probe."""
    if probe.is_cuda and run in _RUNS:
        from blocksparse.kernels.probing import probe_sums_triton

        if probe_sums_triton.takes(probe, run):
            return probe_sums_triton.probe_sums_triton(probe, k, scale, run)
    return None

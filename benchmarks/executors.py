"""Executors side by side on the same masks: `python -m benchmarks.executors {cpu,gpu}`.

Refuses to time what fails its check: sampled blocks of every executor's output against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs


@frozen
class Case:
    """One shape and one random causal mask: diagonal and first block kept, the rest Bernoulli."""

    N: int
    Hq: int
    Hkv: int
    D: int
    q_block: int
    k_block: int
    density: float
    dtype: torch.dtype

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(
            torch.randn(1, H, self.N, self.D, device=device, dtype=self.dtype)
            for H in (self.Hq, self.Hkv, self.Hkv)
        )  # type: ignore[return-value]

    def mask(self, q: Tensor, k: Tensor) -> bs.BlockMask:
        grid = bs.Grid.of(q, k, bs.GlobalPermutation(), q_block=self.q_block, k_block=self.k_block, causal=True)
        shape = (1, self.Hq, grid.rows, grid.cols)
        keep = torch.rand(shape, device=q.device) < self.density
        return bs.BlockMask((keep | grid.diagonal | grid.holding_first(1)) & grid.reachable, grid)


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, *, samples: int = 6) -> None:
    """Sampled rows against the float64 meaning.

    Raises:
        RuntimeError: an output is not finite, or off by more than a low-precision kernel may be.
    """
    grid, group = mask.grid, q.shape[1] // k.shape[1]
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    for _ in range(samples):
        h = int(torch.randint(q.shape[1], (), generator=generator))
        row = int(torch.randint(grid.rows, (), generator=generator))
        first, last = row * grid.q_block, min((row + 1) * grid.q_block, grid.q_len)
        parts = [q[:, h : h + 1, first:last], *(x[:, h // group : h // group + 1, :last] for x in (k, v))]
        part_q, part_k, part_v = (x.double() for x in parts)
        identity = bs.GlobalPermutation()
        part = bs.Grid.of(part_q, part_k, identity, q_block=grid.q_block, k_block=grid.k_block, causal=True)
        kept = bs.BlockMask(mask.keep[:, h : h + 1, row : row + 1, : part.cols], part)
        want = bs.ReferenceExecutor()(part_q, part_k, part_v, identity, kept, scale=q.shape[-1] ** -0.5).out
        got = out[:, h : h + 1, first:last].double()
        error = float((got - want).norm() / want.norm())
        if not error < 1e-2:
            raise RuntimeError(f"head {h}, row {row}: relative error {error:.2e}")


def time_gpu(call: Callable[[], object]) -> float:
    """Median milliseconds on the device."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def time_cpu(call: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of wall time, after one warm-up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def kept_flops(mask: bs.BlockMask, D: int) -> float:
    """Floating-point operations over kept blocks: two matrix products, two operations each."""
    return float(mask.keep.sum()) * mask.grid.q_block * mask.grid.k_block * D * 4


def flex_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> Callable[[], Tensor]:
    """FlexAttention with the lists built beforehand, and the plain causal `mask_mod` that it needs on a GPU."""
    from torch.nn.attention import flex_attention as flex

    plan = bs.BlockPlan.of(mask)
    block_mask = flex.BlockMask.from_kv_blocks(
        plan.partial_count, plan.partial_index, plan.full_count, plan.full_index,
        BLOCK_SIZE=(plan.q_block, plan.k_block), mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(q.shape[2], k.shape[2]), compute_q_blocks=False,
    )  # fmt: skip
    compiled = torch.compile(flex.flex_attention)
    return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)


def triton_call(
    q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, config: object = None
) -> Callable[[], Tensor]:
    """Our kernel with the lists built beforehand."""
    from blocksparse.kernels.sparse_attention import can_use_tma, default_config, sparse_attention

    grid, plan = mask.grid, bs.BlockPlan.of(mask)
    c: Any = config or default_config(grid.q_block, grid.k_block, q.shape[-1], q.element_size())
    return lambda: sparse_attention(
        q, k, v, plan.partial_count, plan.partial_index, plan.full_count, plan.full_index,
        grid.q_position, grid.k_position[:, :, 0], grid.q_block, grid.k_block, 0, True, q.shape[-1] ** -0.5,
        c.block_m, c.block_n, c.num_warps, c.num_stages, c.tma and can_use_tma(k, v),
    )[0]  # fmt: skip


def gpu(lengths: list[int], densities: list[float], D: int, sweep: bool) -> list[dict[str, Any]]:
    """TFLOP/s over kept blocks, ours against compiled FlexAttention, in one run on the same masks."""
    from blocksparse.kernels.sparse_attention import TileConfig

    configs: dict[str, Any] = {"triton": None}
    if sweep:
        configs |= {
            f"{m}x{n} w{w} s{s} {'tma' if tma else 'ptr'}": TileConfig(m, n, w, s, tma)
            for m, n, w, s, tma in (
                (128, 128, 8, 2, True), (128, 128, 8, 3, True), (128, 128, 8, 2, False), (128, 128, 8, 3, False),
                (128, 64, 8, 3, True), (128, 64, 4, 3, True), (128, 64, 8, 4, True), (128, 64, 4, 3, False),
                (128, 128, 4, 2, True), (64, 128, 4, 3, True), (64, 64, 4, 4, True),
            )
        }  # fmt: skip
    rows = []
    for N in lengths:
        for density in densities:
            case = Case(N, 32, 8, D, 128, 128, density, torch.bfloat16)
            q, k, v = case.inputs("cuda")
            mask = case.mask(q, k)
            calls = {"flex": flex_call(q, k, v, mask)}
            calls |= {name: triton_call(q, k, v, mask, config) for name, config in configs.items()}
            flops, rate = kept_flops(mask, D), {}
            for name, call in calls.items():
                try:
                    check(call(), q, k, v, mask)
                    rate[name] = flops / time_gpu(call) / 1e9
                except Exception as error:  # a configuration that does not compile is a row of the sweep
                    if not sweep or name in ("flex", "triton"):
                        raise
                    print(name, type(error).__name__, str(error).strip()[:80], flush=True)
            real = float(mask.density().mean())
            rows.append({"N": N, "D": D, "density": real, **rate})
            print(
                f"N={N} D={D} density={real:.3f} " + " ".join(f"{n}={r:.0f}" for n, r in rate.items()), flush=True
            )
    return rows


def cpu(N: int, density: float, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Milliseconds of `FlexExecutor`, plan included, against dense SDPA: 9 heads, 3 KV heads, D=64."""
    case = Case(N, 9, 3, 64, 128, 128, density, dtype)
    q, k, v = case.inputs("cpu")
    mask, executor = case.mask(q, k), bs.FlexExecutor()

    def sparse() -> Tensor:
        return executor(q, k, v, bs.GlobalPermutation(), mask, scale=64**-0.5).out

    check(sparse(), q, k, v, mask)
    dense_ms = time_cpu(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    sparse_ms = time_cpu(sparse)
    real = float(mask.density().mean())
    print(
        f"N={N} {dtype} density={real:.3f} dense {dense_ms:.0f} ms, FlexExecutor {sparse_ms:.0f} ms: "
        f"{dense_ms / sparse_ms:.2f} x"
    )
    return [{"N": N, "density": real, "dense_ms": dense_ms, "flex_ms": sparse_ms}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--lengths", type=int, nargs="+", default=None)
    parser.add_argument("--densities", type=float, nargs="+", default=None)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sweep", action="store_true", help="GPU: a list of kernel configurations too")
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    if arguments.where == "gpu":
        lengths, densities = arguments.lengths or [32768, 131072], arguments.densities or [1.0, 0.3, 0.1, 0.05]
        rows = gpu(lengths, densities, arguments.head_dim, arguments.sweep)
    else:
        rows = [
            row
            for N in arguments.lengths or [8192]
            for density in arguments.densities or [0.1]
            for dtype in (torch.float32, torch.bfloat16)
            for row in cpu(N, density, dtype)
        ]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()

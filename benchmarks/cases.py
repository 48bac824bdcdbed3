"""What is measured, as data: presets, lengths, densities and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

import blocksparse as bs
from benchmarks.inputs import QKV, structured

AnyPipeline = bs.Pipeline[Any, Any, Any]


@frozen
class Preset:
    """A paper as it is measured, up to the longest prompt that is worth waiting for."""

    name: str
    pipeline: Callable[..., AnyPipeline]
    longest: int = 1 << 20
    automatic: bool = True  # its executor is AutoExecutor, which another may stand for


@frozen
class Plan:
    """Which points each table has."""

    Hq: int
    Hkv: int
    dtype: torch.dtype
    head_dims: tuple[int, ...]  # rates, blocks
    wide: tuple[tuple[int, int], ...]  # wide: head dims of keys and of values
    wide_densities: tuple[float, ...]  # wide
    kernel_lengths: tuple[int, ...]  # rates, wide, blocks, eight_bit, gather, s2o
    densities: tuple[float, ...]  # rates, eight_bit
    blocks: tuple[tuple[int, int], ...]  # blocks; the first is what all else takes
    block_densities: tuple[float, ...]  # blocks
    segment: int  # gather, s2o: queries per key map
    gather_densities: tuple[float, ...]  # gather
    prefix: int  # s2o: earlier keys in a coarse map
    taus: tuple[float, ...]  # s2o: of coarse maps at the greatest length; elsewhere the first alone
    presets: tuple[Preset, ...]  # stages, calls
    lengths: tuple[int, ...]  # stages, calls
    call_density: float  # calls: what PBS-Attn's threshold is chosen for
    growth: tuple[tuple[int, float], ...]  # growth: length, share of each row's blocks
    crossover: tuple[tuple[int, int, int], ...]  # crossover: query heads, queries, keys
    D: int  # eight_bit, gather, stages, s2o, calls, growth, crossover
    cpu_lengths: tuple[int, ...]
    budget_ms: float  # time spent on one figure, compilation and the check aside
    executor: bs.Executor[Any, Any] | None = None  # of automatic presets

    def inputs(self, N: int, device: torch.device) -> QKV:
        """Structured `q` `[1, Hq, N, D]`, `k`, `v` `[1, Hkv, N, D]`."""
        return structured(N, self.Hq, self.Hkv, self.D, device, self.dtype)

    def pipeline(self, preset: Preset, *, sparse: bool = False) -> AnyPipeline:
        """A preset at its defaults, with this plan's executor; `sparse` even where `AutoExecutor` is dense."""
        executor = self.executor or (bs.TritonExecutor() if sparse else bs.AutoExecutor())
        return preset.pipeline(executor=executor if preset.automatic else None)


_PRESETS = (
    Preset("pbs_attn", bs.pbs_attn),
    Preset("mean_pooling", bs.mean_pooling),
    Preset("bfla", bs.bfla),
    Preset("sparge", bs.sparge),
    Preset("xattention", bs.xattention),
    Preset("pbs_attn_plus", bs.pbs_attn_plus),
    Preset("flex_prefill", bs.flex_prefill),
    Preset("minference", bs.minference),
    Preset("s2o", bs.s2o, longest=32768, automatic=False),
)

FULL = Plan(
    Hq=32,
    Hkv=8,
    dtype=torch.bfloat16,
    head_dims=(128, 64),
    wide=((256, 256), (192, 128), (128, 128)),
    wide_densities=(1.0, 0.1),
    kernel_lengths=(32768, 131072),
    densities=(1.0, 0.3, 0.1, 0.05),
    blocks=((128, 128), (128, 64), (64, 64)),
    block_densities=(0.3, 0.1),
    segment=1024,
    gather_densities=(0.1, 0.05),
    prefix=8192,
    taus=(0.01, 0.001, 0.003, 0.03, 0.1),
    presets=_PRESETS,
    lengths=(8192, 32768, 131072),
    call_density=0.1,
    # As many blocks a row at 1M as at 64K, and never more than a third of them.
    growth=(
        (8192, 0.32),
        (32768, 0.32),
        (65536, 0.32),
        (131072, 0.16),
        (262144, 0.08),
        (524288, 0.04),
        (1 << 20, 0.02),
    ),
    crossover=(
        *((32, N, N) for N in (1024, 2048, 3072, 4096, 8192, 12288, 16384)),
        *((8, N, N) for N in (2048, 4096, 8192, 16384, 32768)),
        *((4, N, N) for N in (4096, 8192, 16384, 32768, 65536)),
        *((32, 2048, N) for N in (4096, 8192, 16384, 32768, 65536)),
    ),
    D=128,
    cpu_lengths=(8192,),
    budget_ms=150.0,
)

QUICK = Plan(
    Hq=32,
    Hkv=8,
    dtype=torch.bfloat16,
    head_dims=(128,),
    wide=((256, 256), (192, 128)),
    wide_densities=(0.1,),
    kernel_lengths=(32768,),
    densities=(1.0, 0.1),
    blocks=FULL.blocks,
    block_densities=(0.1,),
    segment=1024,
    gather_densities=(0.1,),
    prefix=8192,
    taus=(0.01, 0.1),
    presets=_PRESETS[:2],
    lengths=(8192, 32768),
    call_density=0.1,
    growth=((32768, 0.32), (131072, 0.16)),
    crossover=((32, 4096, 4096), (32, 16384, 16384), (4, 16384, 16384), (32, 2048, 32768)),
    D=128,
    cpu_lengths=(2048,),
    budget_ms=50.0,
)

# Shapes at which the interpreter and plain torch answer in seconds: to try the program, not to measure.
TINY = Plan(
    Hq=4,
    Hkv=2,
    dtype=torch.float32,
    head_dims=(32,),
    wide=((64, 32),),
    wide_densities=(1.0,),
    kernel_lengths=(256,),
    densities=(1.0, 0.3),
    blocks=((64, 64), (64, 32), (32, 32)),
    block_densities=(0.3,),
    segment=64,
    gather_densities=(0.8,),
    prefix=64,
    taus=(0.01, 0.3),
    presets=(Preset("pbs_attn", lambda executor: bs.pbs_attn(block=32, S=64, executor=executor)), _PRESETS[1]),
    lengths=(256,),
    call_density=0.5,
    growth=((128, 0.5), (256, 0.25)),
    crossover=((4, 128, 128), (2, 64, 128)),
    D=32,
    cpu_lengths=(512,),
    budget_ms=5.0,
    executor=bs.ReferenceExecutor(),
)

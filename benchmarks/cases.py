"""What is measured, as data: presets, lengths, densities and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

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
class Must:
    """A target: the time of `over` over the time of `figure` is at least this."""

    figure: str
    least: float
    over: str = "dense"  # the fastest dense call


NEVER_SLOWER = Must("AutoExecutor", 1 / 1.05)


def _with_never_slower(must: tuple[Must, ...]) -> tuple[Must, ...]:
    return (*must, NEVER_SLOWER)


@frozen
class Served:
    """A call as servers make it: a whole prompt, the last queries of one, or several prompts packed."""

    Hq: int
    Hkv: int
    keys: tuple[int, ...]  # of each prompt
    queries: int | None = None  # of a chunk: the last ones of each prompt; all if None
    D: int = 128
    Dv: int | None = None  # as `D`
    must: tuple[Must, ...] = field(default=(), converter=_with_never_slower)
    page_sizes: tuple[int, ...] = ()  # of paged caches to read the same keys from
    stages: bool = False  # whether to say where the GPU's time goes
    graph: bool = False  # whether to capture the call too


@frozen
class Plan:
    """Which points each table has."""

    Hq: int
    Hkv: int
    dtype: torch.dtype
    head_dims: tuple[int, ...]  # rates, blocks
    wide: tuple[tuple[int, int], ...]  # wide: head dims of keys and of values
    wide_densities: tuple[float, ...]  # wide
    kernel_lengths: tuple[int, ...]  # rates, wide, blocks, eight_bit, gather, s2o; windows the first
    densities: tuple[float, ...]  # rates, eight_bit
    blocks: tuple[tuple[int, int], ...]  # blocks; the first is what all else takes
    block_densities: tuple[float, ...]  # blocks
    whole_blocks: tuple[tuple[int, int, int, int, int], ...]  # heads, tokens, D, block, blocks kept in each row
    segment: int  # gather, s2o: queries per key map
    gather_densities: tuple[float, ...]  # gather
    prefix: int  # s2o: earlier keys in a coarse map
    taus: tuple[float, ...]  # s2o: of coarse maps at the greatest length; elsewhere the first alone
    presets: tuple[Preset, ...]  # stages, calls
    lengths: tuple[int, ...]  # stages, calls
    call_density: float  # calls: what PBS-Attn's threshold is chosen for
    growth: tuple[tuple[int, float], ...]  # growth: length, share of each row's blocks
    crossover: tuple[tuple[int, int, int], ...]  # crossover: query heads, queries, keys
    serving: tuple[Served, ...]
    D: int  # eight_bit, gather, stages, s2o, calls, growth, crossover
    layers: tuple[tuple[int, int, int], ...]  # windows: head dim, query heads, KV heads
    windows: tuple[int, ...]
    cpu: tuple[tuple[int, int, int, tuple[float, ...]], ...]  # cpu: tokens, D, block; densities
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

EMPTY, ONE_BY_ONE = "empty kernels", "pbs_attn, one by one"  # what targets of `serving` compare with
EMPTY_LAUNCHES = 12  # empty kernels that are launched to be compared with, as many as `pbs_attn` launches
_PAGES = (16, 64, 128)
_HOST = Must("pbs_attn", 1 / 2.5, EMPTY)
_PACKED = (
    Must("pbs_attn", 0.95, ONE_BY_ONE),
    *(Must(f"pbs_attn, pages of {size}", 0.9, ONE_BY_ONE) for size in _PAGES),
)
# What has a target first: a run that is cut short keeps the rows that it has.
_SERVING = (
    Served(32, 8, (16384,), must=(_HOST,)),
    Served(8, 2, (16384,), must=(Must("pbs_attn", 1.5), _HOST), stages=True, graph=True),
    Served(4, 1, (32768,), must=(Must("pbs_attn", 2.5),), stages=True),
    Served(32, 8, (131072,), queries=2048, must=(Must("pbs_attn", 4.0),), stages=True),
    Served(32, 8, (131072,), queries=8192, must=(Must("pbs_attn", 8.0),), stages=True),
    Served(32, 8, (16384,) * 4, must=_PACKED, page_sizes=_PAGES),
    Served(32, 8, (1024, 1500, 2048, 3000, 4096, 8192, 16384, 32768), must=_PACKED, page_sizes=_PAGES),
    Served(32, 8, (32768,), queries=2048, stages=True),
    Served(32, 8, (32768,), queries=8192, stages=True),
    *(Served(Hq, Hq // 4, (131072,), queries=2048, stages=True, graph=True) for Hq in (8, 4)),
    *(Served(8, 2, (N,), stages=True) for N in (8192, 32768, 131072)),
    *(Served(4, 1, (N,), stages=True) for N in (16384, 131072)),
    Served(16, 8, (32768,), D=256),
    Served(16, 8, (32768,), D=192, Dv=128),
    *(Served(32, 8, (N,)) for N in (65536, 131072)),
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
    # the lengths of video models, and a quarter, a tenth or less of their blocks
    whole_blocks=(
        (7, 75776, 128, 64, 296),
        (7, 75776, 128, 128, 148),
        (7, 109568, 128, 64, 62),
        (7, 109568, 128, 128, 30),
        (40, 75648, 128, 64, 118),
        (40, 75648, 128, 128, 58),
        (24, 32768, 64, 64, 102),
        (24, 32768, 64, 128, 50),
    ),
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
        *((4, 2048, N) for N in (32768, 65536, 98304, 131072)),  # too few tiles of queries for a large GPU
    ),
    serving=_SERVING,
    D=128,
    layers=((256, 16, 8), (128, 32, 8), (64, 64, 8)),
    windows=(128, 1024, 4096),
    cpu=(
        (4096, 64, 128, (1.0, 0.5, 0.3, 0.15, 0.05)),
        (4096, 64, 64, (1.0, 0.3, 0.05)),
        (4096, 128, 128, (1.0, 0.3, 0.05)),
        (2048, 64, 128, (1.0, 0.3, 0.05)),
        (8192, 64, 128, (1.0, 0.3, 0.05)),
    ),
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
    whole_blocks=((8, 16384, 128, 64, 64), (8, 16384, 128, 128, 32)),
    segment=1024,
    gather_densities=(0.1,),
    prefix=8192,
    taus=(0.01, 0.1),
    presets=_PRESETS[:2],
    lengths=(8192, 32768),
    call_density=0.1,
    growth=((32768, 0.32), (131072, 0.16)),
    crossover=((32, 4096, 4096), (32, 16384, 16384), (4, 16384, 16384), (32, 2048, 32768)),
    serving=(
        Served(8, 2, (16384,), must=(Must("pbs_attn", 1.5), _HOST), stages=True, graph=True),
        Served(32, 8, (32768,), queries=2048, stages=True),
        Served(32, 8, (8192, 16384), must=_PACKED[:2], page_sizes=_PAGES[:1]),
        Served(16, 8, (16384,), D=192, Dv=128),
    ),
    D=128,
    layers=((128, 32, 8),),
    windows=(1024,),
    cpu=((2048, 64, 128, (0.3,)),),
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
    whole_blocks=((2, 128, 32, 32, 2),),
    segment=64,
    gather_densities=(0.8,),
    prefix=64,
    taus=(0.01, 0.3),
    presets=(Preset("pbs_attn", lambda executor: bs.pbs_attn(block=32, S=64, executor=executor)), _PRESETS[1]),
    lengths=(256,),
    call_density=0.5,
    growth=((128, 0.5), (256, 0.25)),
    crossover=((4, 128, 128), (2, 64, 128)),
    serving=(
        Served(4, 2, (256,), D=32, must=(Must("pbs_attn", 1.5), _HOST), stages=True, graph=True),
        Served(2, 1, (256,), queries=100, D=32, Dv=16),
        Served(2, 1, (128, 200), D=32, must=_PACKED[:2], page_sizes=_PAGES[:1]),
    ),
    D=32,
    layers=((32, 2, 1),),
    windows=(100,),
    cpu=((512, 64, 128, (0.3,)),),
    budget_ms=5.0,
    executor=bs.ReferenceExecutor(),
)

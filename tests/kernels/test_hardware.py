"""What a device has, and tiles that fit it: as PyTorch says, and as the table has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from triton.runtime.errors import OutOfResources

import blocksparse as bs
from blocksparse.kernels.attention.sparse_attention_triton import most_registers
from blocksparse.kernels.common import hardware
from blocksparse.kernels.common.hardware import TARGETS, fitted, of_attention
from blocksparse.kernels.common.sizes import power_of_2
from blocksparse.kernels.common.tiles import portable
from blocksparse.kernels.gemm.pooled_sums_triton import pooled_tiles, shared_memory
from blocksparse.kernels.gemm.products import StridedPooling
from blocksparse.kernels.score.strided_mass import _fill_tiles
from blocksparse.launch.launches import LookedUp
from blocksparse.testing import every_preset, make_qkv
from tests.kernels.foretold import foretold
from tests.machine import GPU
from tests.on_kernels import pretend_gpu


def says(**more: object) -> SimpleNamespace:
    """What PyTorch says of an A10."""
    return SimpleNamespace(
        major=8,
        minor=6,
        gcnArchName="",
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        **more,
    )


def asked(monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace) -> hardware.Hardware:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return hardware._asked.__wrapped__(0)


def test_a_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = TARGETS["sm_86"]
    full = says(shared_memory_per_block_optin=known.shared, regs_per_multiprocessor=known.registers)
    assert asked(monkeypatch, full) == known
    assert asked(monkeypatch, says()) == known  # builds that do not say all
    less = says(shared_memory_per_block_optin=64 << 10)
    assert asked(monkeypatch, less) == evolve(known, shared=64 << 10)
    unknown = says()
    unknown.minor = 8
    assert asked(monkeypatch, unknown).shared == 48 << 10
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = says()
    amd.gcnArchName, amd.warp_size, amd.max_threads_per_multi_processor = "gfx942:sramecc+:xnack-", 64, 2048
    amd.shared_memory_per_block = amd.shared_memory_per_multiprocessor = 64 << 10
    assert asked(monkeypatch, amd) == TARGETS["gfx942"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_default_tiles_fit_every_target(name: str, itemsize: int) -> None:
    has, values = TARGETS[name], max(itemsize, 2)
    for head_dim in (64, 96, 128, 192, 256):
        for block in (64, 128):
            tiles = portable(block, block, head_dim, itemsize, has, value_bytes=values)
            padded = 1 << (head_dim - 1).bit_length()
            options = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "num_stages": tiles.num_stages}
            rows = padded * itemsize, padded * values
            assert of_attention(has, options, *rows, values, rows[1]) <= has.shared
            assert block % tiles.block_m == block % tiles.block_n == 0


@pytest.mark.skipif(GPU, reason="pretends other GPUs than there are")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_tiles_of_single_tokens_fit_every_target(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no tile holds a block of keys, the kernel is not taken."""
    pretend_gpu(monkeypatch, TARGETS[name])
    for D in (16, 64, 96, 128, 256, 512):
        q = torch.zeros(1, 1, 1, D, dtype=dtype)
        for wide in (1, 16, 64, 128):
            tiles, row_bytes = pooled_tiles(q, wide), power_of_2(D) * dtype.itemsize
            if tiles is not None:
                assert shared_memory(TARGETS[name], tiles, row_bytes, dtype.itemsize, wide) <= TARGETS[name].shared
            else:
                assert row_bytes > 256  # half precision up to D=128 always fits
                assert not _fill_tiles(q, q, StridedPooling(1, 0, 2, wide, causal=True, padded_tail=False))


@pytest.mark.parametrize(
    ("name", "kernel", "D", "itemsize", "tiles", "takes"),
    [
        ("sm_86", "sparse_attention_triton", 64, 4, (64, 32, 4, 2), 57_472),
        ("sm_86", "sparse_attention_triton", 128, 4, (32, 32, 4, 2), 90_240),
        ("sm_86", "gather_attention_triton", 128, 4, (64, 16, 8, 2), 98_368),
        ("sm_86", "pooled_sums_triton", 64, 4, (64, 64, 4, 2), 65_536),
        ("sm_86", "pooled_sums_triton", 128, 4, (32, 64, 4, 2), 98_304),
        ("gfx950", "sparse_attention_triton", 64, 2, (128, 32, 4, 2), 16_832),
        ("gfx950", "sparse_attention_triton", 128, 4, (32, 32, 4, 2), 65_536),
    ],
)
def test_what_triton_3_8_takes_more_is_foretold(
    name: str, kernel: str, D: int, itemsize: int, tiles: tuple[int, int, int, int], takes: int
) -> None:
    """The most that Triton 3.8.0 reports for these tiles: it keeps both parts of fp32 in shared memory, or all stages."""
    has = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tiles, strict=True))
    has |= {"BLOCK_D": D, "BLOCK_DV": D, "WIDE": 8}
    told = foretold(TARGETS[name], f"{kernel}._kernel", has, [itemsize] * 4)
    assert told is not None
    assert takes <= told <= TARGETS[name].shared


def test_what_does_not_fit_gets_smaller_until_it_does() -> None:
    options = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "D": 64}
    has = evolve(TARGETS["sm_80"], shared=2**13)
    small = fitted(options, lambda x: x["BLOCK_M"] * x["BLOCK_N"] * x["num_stages"], has)
    assert small == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "D": 64}
    held = fitted(options, lambda x: x["BLOCK_M"] * x["BLOCK_N"] * x["num_stages"], has, rows=False)
    assert held["BLOCK_M"] == 128
    nothing_fits = fitted(options, lambda x: 2**20, has)
    assert nothing_fits["BLOCK_N"] == 16
    assert nothing_fits["num_stages"] == 1


def test_registers_are_asked_for_where_tiles_were_not_measured() -> None:
    """`compile_ahead.py` compares with what the compiler spills; 65,536 registers are all that a multiprocessor has."""
    for name, warps, value_bytes, most in (
        ("sm_86", 8, 512, 255),
        ("sm_120", 4, 256, 255),
        ("sm_86", 4, 256, 255),  # fp32
        ("sm_100", 8, 512, 255),
        ("sm_120", 4, 128, 255),
        ("sm_100", 4, 128, 255),
        ("sm_100", 16, 512, 128),
    ):
        assert most_registers(TARGETS[name], warps, value_bytes) == {"maxnreg": most}
        assert 32 * warps * most <= 65536
    assert most_registers(TARGETS["sm_86"], 4, 128) == {}  # no form of the kernel spills
    assert most_registers(TARGETS["sm_120"], 8, 256) == {}
    assert most_registers(TARGETS["sm_90"], 4, 128) == {}
    assert most_registers(TARGETS["gfx942"], 4, 128) == {}  # AMD's compiler has no such option


SMALL = evolve(TARGETS["sm_86"], shared=48 << 10)


def launch_within(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches fail as Triton lets them fail if they take more; their kernels are in the list."""
    launch, seen = LookedUp._launch, []

    def checked(self: Any, grid: Any, *args: Any, **named: Any) -> None:
        name = f"{self.jit.fn.__module__.rpartition('.')[2]}.{self.jit.fn.__name__}"
        itemsizes = [x.element_size() for x in args if isinstance(x, torch.Tensor)]
        needs = foretold(SMALL, name, {"num_stages": 1, **named}, itemsizes)
        if needs is not None:
            seen.append(name)
            if needs > SMALL.shared:
                raise OutOfResources(needs, SMALL.shared, "shared memory")
        launch(self, grid, *args, **named)

    monkeypatch.setattr(LookedUp, "_launch", checked)
    return seen


@pytest.mark.skipif(GPU, reason="pretends another GPU than there is")
@pytest.mark.parametrize(
    ("name", "D"),
    [
        *(pytest.param(name, 128, marks=[pytest.mark.slow] * (name != "auto")) for name in every_preset),
        *(pytest.param(name, 256, marks=pytest.mark.slow) for name in ("pbs_attn", "minference", "s2o")),
    ],
)
def test_every_preset_runs_in_48_kib(name: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks as large as it has by default."""
    pipeline = every_preset[name]()
    if isinstance(pipeline.executor, bs.AutoExecutor):
        pipeline = evolve(pipeline, executor=bs.TritonExecutor())
    q, k, v = make_qkv(Hq=2, Hkv=1, N=300, D=D, dtype=torch.float16)
    pretend_gpu(monkeypatch, SMALL)
    seen = launch_within(monkeypatch)
    out = pipeline(q, k, v)
    assert seen
    if not isinstance(pipeline.executor, bs.GatherExecutor):  # which stops early
        want = evolve(pipeline, executor=bs.ReferenceExecutor())(q, k, v)
        assert float((out - want).abs().max()) < 4e-3

"""Kernels compiled ahead: none is left out, each that fails is a reason, and many lengths compile few forms."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter
from typing import Any

import pytest
import torch

from blocksparse.testing import every_preset, make_qkv
from tests.kernels.ahead import ping_pong_barriers
from tests.kernels.compile_ahead import multiplies
from tests.kernels.scripts import printed_by
from tests.machine import HOPPER, needs_gpu
from tests.on_kernels import small_preset

pytest.importorskip("triton")
from blocksparse import kernels
from blocksparse.launch.launches import LookedUp, Remembered


def of_the_package() -> set[str]:
    """`top_k_triton._kernel` and all others that are launched."""
    names = [x.name for x in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    modules = [importlib.import_module(x) for x in names if not x.endswith("flash_attention_4_mask")]  # CuTe's
    launched = {
        x.jit.fn for module in modules for x in vars(module).values() if isinstance(x, LookedUp | Remembered)
    }
    return {f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}" for fn in launched}


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus_that_are_not_here() -> None:
    """Each once for Hopper, and what multiplies for CDNA 3; `make compile-ahead` has every GPU, dtype and form."""
    printed = printed_by("compile_ahead", "sm_90", "gfx942", "--dtypes", "bf16", "--dims", "128", "--once")
    compiled: dict[str, set[str]] = {}
    for target, _, _, kernel, *_ in (line.split() for line in printed.splitlines()[:-1]):
        compiled.setdefault(target, set()).add(kernel)
    every = of_the_package()
    assert len(every) > 40
    assert compiled["sm_90"] == every
    assert compiled["gfx942"] == {x for x in every if multiplies(x) and "_hopper." not in x}


GO_ON = {  # other kernels run instead
    "gather_attention_hopper._kernel", "int8_attention_hopper._kernel", "split_kv._split", "split_kv._combine",
    "sparse_attention_hopper._kernel", "tile_operands_triton.value_kernel", "tile_rotation_triton.key_kernel",
    "tile_rotation_triton.query_kernel",
}  # fmt: skip


@pytest.mark.slow
def test_every_kernel_that_fails_is_a_reason() -> None:
    said = dict(line.split(" ", 1) for line in printed_by("plant_failures").splitlines())
    assert set(said) == of_the_package()
    assert {kernel for kernel, what in said.items() if what == "goes on"} == GO_ON
    for kernel in said.keys() - GO_ON:
        of_a_stage = (
            f"LaunchError: {kernel} cannot be compiled or launched on this device .*: try other blocks or .*"
        )
        of_an_executor = f"UnsupportedError: \\w+Executor cannot run .*: {kernel} cannot be .* (Use|Choose) .*\\."
        assert re.fullmatch(f"{of_a_stage}|{of_an_executor}", said[kernel]), said[kernel]
        assert "\\n" not in said[kernel]


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        ("", []),
        ("bar.sync 14, 128;", ["14"]),  # of another role's warps
        ("barrier.cta.sync.aligned 15;", ["15"]),
        ("bar.sync %r7, 64;", ["14", "15"]),
        ("bar.arrive 13, 256;", ["13"]),  # for which nobody waits
    ],
)
def test_a_turn_that_others_take_is_seen(planted: str, wrong: list[str]) -> None:
    """That no kernel has one is looked at where they are compiled (`compile_ahead.py`)."""
    own = "bar.sync 0, 128; barrier.sync 1; bar.warp.sync -1; "
    turns = "bar.sync 14, 256; bar.arrive 15, 256; bar.sync 15, 256; bar.arrive 14, 256; "
    assert sorted(ping_pong_barriers(own + turns + planted)[1]) == wrong
    assert ping_pong_barriers(own) == (set(), [])


@pytest.mark.slow
def test_branches_keep_the_order_of_machine_code() -> None:
    """By the ptxas of this Triton; `make compile-ahead TRITON=3.9.0` looks at all kernels, by that of another one."""
    printed = printed_by("compile_ahead", "--order")
    assert re.search(r"wrong order: \[\]; without 8 branches: \['", printed)


LIMIT = 5
# Of the first, sums are taken in an order that the width of a row decides, and the scores of a width must not change; the
# second takes a quarter less time for rows of up to 128 blocks where its tile is no wider.
MORE = {"block_softmax_triton._block_softmax_kernel": 6, "top_cdf_triton._top_cdf_kernel": 7}


@pytest.mark.slow
def test_many_lengths_compile_a_kernel_a_handful_of_times() -> None:
    """By what Triton would look at in every launch of every preset, on two kinds of GPU."""
    lines = [line.split() for line in printed_by("variants", "lengths").splitlines()]
    assert {name for _, name, *_ in lines} >= set(every_preset)
    assert {"sparse_attention_hopper._kernel", "int8_attention_hopper._kernel"} <= {line[2] for line in lines}
    too_many = [line for line in lines if int(line[3]) > MORE.get(line[2], LIMIT)]
    assert not too_many


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", every_preset)
def test_compilations_on_this_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own hook; what was compiled before is not compiled again."""
    from triton import knobs

    compiled: Counter[str] = Counter()

    def note(*, fn: Any, **_: Any) -> None:
        compiled[f"{fn.module.rpartition('.')[2]}.{fn.name}"] += 1

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    pipeline = small_preset(name, 4 if HOPPER else 1)
    prompt = make_qkv(Hq=4, Hkv=2, N=16384, D=64, dtype=torch.float16, device="cuda")
    for N in torch.randint(1, 16385, (60,)).tolist():
        q, k, v = (x[:, :, :N].clone() for x in prompt)
        pipeline(q, k, v)
    print(compiled)
    assert all(count <= MORE.get(kernel, LIMIT) for kernel, count in compiled.items())


@pytest.mark.slow
def test_an_engine_that_is_warm_compiles_nothing() -> None:
    """By what Triton would look at, for chunks of prompts of up to 128K tokens on Hopper."""
    lines = [line.split() for line in printed_by("variants", "engine").splitlines()]
    assert [(name, missing) for name, _, missing, *_ in lines] == [("auto", "0"), ("sparge", "0")]
    assert all(int(compiled) > 20 for _, compiled, *_ in lines)

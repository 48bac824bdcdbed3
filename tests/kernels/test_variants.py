"""How many times a kernel is compiled for prompts of many lengths: a handful, or calls stall for seconds now and then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from blocksparse.testing import every_preset, make_qkv
from tests.kernels.scripts import printed_by
from tests.machine import HOPPER, needs_gpu
from tests.on_kernels import small_preset

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

"""The kernel against float64 under the budget: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.executors.block_plan import BlockPlan
from blocksparse.testing import assert_within_budget, make_qkv

pytest.importorskip("triton")
from blocksparse.kernels.sparse_attention import (
    TileConfig,
    can_use_tma,
    default_config,
    runs_interpreted,
    sparse_attention,
    sparse_attention_reference,
)

GPU = torch.cuda.is_available()
# The interpreter computes bfloat16 wrongly, and is slow.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
LENGTHS = [1, 63, 65, 127, 129, 200, *([1000, 4096] if GPU else [])]


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    causal: bool = True,
    keep: float = 0.5,
    config: TileConfig | None = None,
    k_index: Tensor | None = None,
) -> tuple[Any, ...]:
    """What the kernel takes, for a random mask."""
    permutation = bs.GlobalPermutation(k_index)
    k, v = permutation.gather_keys(k), permutation.gather_keys(v)
    grid = bs.Grid.of(q, k, permutation, q_block=block, k_block=block, causal=causal)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(q.shape[0], q.shape[1], grid.rows, grid.cols, generator=generator).to(q.device) < keep
    plan = BlockPlan.of(bs.BlockMask((chosen | grid.diagonal) & grid.reachable, grid))
    c = config or default_config(block, block, q.shape[-1], q.element_size())
    return (
        q, k, v, plan.partial_count, plan.partial_index, plan.full_count, plan.full_index,
        grid.q_position, grid.k_position[:, :, 0], block, block, grid.q_lead, causal, q.shape[-1] ** -0.5,
        c.block_m, c.block_n, c.num_warps, c.num_stages, c.tma and can_use_tma(k, v),
    )  # fmt: skip


def assert_right(call: tuple[Any, ...]) -> None:
    out, lse = sparse_attention(*call)
    want, want_lse = sparse_attention_reference(*(x.double() for x in call[:3]), *call[3:])
    yardstick, _ = sparse_attention_reference(*call)
    assert_within_budget(out, want, yardstick)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3 if call[0].dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_lengths(N: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv(N=N, Hq=2, Hkv=1, dtype=dtype, device=device)
    assert_right(arguments(q, k, v, block=64))


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_groups(group: int, device: str) -> None:
    q, k, v = make_qkv(B=2, N=90, Hq=2 * group, Hkv=2, D=32, device=device)
    assert_right(arguments(q, k, v, block=32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_head_dims(D: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = make_qkv(N=129, Hq=2, Hkv=1, D=D, dtype=dtype, device=device)
    assert_right(arguments(q, k, v, block=64))


@pytest.mark.parametrize(("D", "Dv"), [(64, 32), (48, 128), (16, 8), (5, 3)])
def test_value_dim_differs(D: int, Dv: int, device: str) -> None:
    q, k, v = make_qkv(N=70, Hq=2, Hkv=1, D=D, Dv=Dv, device=device)
    assert_right(arguments(q, k, v, block=32))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("M", [1, 31, 64, 100, 129])
def test_chunks(M: int, causal: bool, device: str) -> None:
    q, k, v = make_qkv(N=129, M=M, Hq=2, Hkv=1, D=32, device=device)
    assert_right(arguments(q, k, v, block=32, causal=causal))


@pytest.mark.parametrize(("block", "tile_m", "tile_n"), [(64, 16, 32), (64, 64, 16), (96, 32, 32), (48, 16, 16)])
def test_tiles_smaller_than_blocks(block: int, tile_m: int, tile_n: int, device: str) -> None:
    q, k, v = make_qkv(N=200, M=150, Hq=2, Hkv=1, D=32, device=device)
    assert_right(arguments(q, k, v, block=block, config=TileConfig(tile_m, tile_n, 4, 2)))


@pytest.mark.parametrize("order_heads", [1, 2])
def test_permuted_keys(order_heads: int, device: str) -> None:
    """One order per KV head, or per query head."""
    q, k, v = make_qkv(N=150, Hq=2, Hkv=1, D=32, device=device)
    k_index = torch.rand(1, order_heads, 1, 150, generator=torch.Generator().manual_seed(0)).argsort(-1).int()
    assert_right(arguments(q, k, v, block=32, k_index=k_index.to(device)))


def test_strides(device: str) -> None:
    """The layouts hosts have: heads behind tokens, and a cache that is longer than the keys."""
    q, k, v = make_qkv(N=100, Hq=4, Hkv=2, D=32, device=device)
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((1, 2, 160, 32), float("nan"), device=device)
    cache[:, :, :100] = v
    assert_right(arguments(q, k, cache[:, :, :100], block=32))
    assert_right(arguments(q, k, v.transpose(2, 3).contiguous().transpose(2, 3), block=32))


def test_large_logits(device: str) -> None:
    """The running maximum keeps exponents in range, whatever the order in which blocks come."""
    q, k, v = make_qkv(N=200, Hq=2, Hkv=1, D=64, device=device)
    assert_right(arguments(100 * q, k, v, block=32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_in_their_rows(value: float, device: str) -> None:
    q, k, v = make_qkv(N=100, Hq=2, Hkv=1, D=32, device=device)
    clean = sparse_attention(*arguments(q, k, v, block=32))[0]
    q[:, :, 40] = value
    out = sparse_attention(*arguments(q, k, v, block=32))[0]
    others = [i for i in range(100) if i != 40]
    assert torch.equal(out[:, :, others], clean[:, :, others])


def test_custom_op_contract(device: str) -> None:
    """Fake tensors, schema and mutation are as torch.compile expects."""
    q, k, v = make_qkv(N=70, Hq=2, Hkv=1, D=16, device=device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(sparse_attention, arguments(q, k, v, block=32), test_utils=checks)


@pytest.mark.slow
def test_kernel_compiles_in_a_full_graph(device: str) -> None:
    q, k, v = make_qkv(N=70, Hq=2, Hkv=1, D=16, device=device)
    call = arguments(q, k, v, block=32)

    def model(q: Tensor) -> Tensor:
        out: Tensor = sparse_attention(2 * q, *call[1:])[0]
        return out + 1

    torch.testing.assert_close(torch.compile(model, fullgraph=True)(q), model(q))


def test_config_is_refused_or_used(device: str) -> None:
    q, k, v = make_qkv(N=70, D=16, device=device)
    front = bs.Identity(), bs.MeanPoolScorer(32), bs.TopK(2)
    with pytest.raises(ValueError, match=r"block_m=64.* does not divide blocks of 32 x 32"):
        bs.Pipeline(*front, bs.TritonExecutor(TileConfig(64, 32, 4, 2)))(q, k, v)
    bs.Pipeline(*front, bs.TritonExecutor(TileConfig(16, 32, 4, 2)))(q, k, v)


@pytest.mark.skipif(GPU, reason="what the interpreter cannot do")
def test_interpreter_refuses_bfloat16() -> None:
    assert runs_interpreted()
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        bs.pbs_attn(executor=bs.TritonExecutor())(*make_qkv(dtype=torch.bfloat16))


def test_plain_cpu_tensors_say_what_to_use() -> None:
    """Outside the interpreter, the line that runs on a GPU tells a CPU user all reasons and the way out."""
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import torch\nfrom blocksparse import *\n"
        "q, k, v = torch.rand(1, 4, 64, 16), torch.rand(1, 2, 64, 16), torch.rand(1, 2, 64, 16)\n"
        "try: Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)\n"
        "except ValueError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "TritonExecutor cannot run q (1, 4, 64, 16) float32 on cpu" in printed
    assert "Triton compiles for GPUs, and these tensors are on cpu" in printed
    assert "Use AutoExecutor(), or FlexExecutor() or ReferenceExecutor() on a CPU." in printed


def test_verbatim(device: str) -> None:
    q, k, v = make_qkv(N=600, Hq=2, Hkv=1, D=32, device=device)
    names = vars(bs)
    line = "Pipeline(SegmentKeySort(S=256), MeanPoolScorer(), TopCdf(0.9), TritonExecutor())(q, k, v)"
    assert eval(line, names, {"q": q, "k": k, "v": v}).shape == q.shape


@pytest.mark.slow
def test_compiles_ahead_of_time() -> None:
    """For sm_80, sm_90, sm_100 and gfx942, without any of them here."""
    script = Path(__file__).parent / "compile_ahead.py"
    code = f"import os, runpy; os.environ.pop('TRITON_INTERPRET', None); runpy.run_path({str(script)!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert f"{target} bf16 D=128" in result.stdout

"""Executors that call packages of others: every reason why not, and the same output where one is installed."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import blocksparse as bs
from blocksparse.execute import packages
from blocksparse.execute.packages import not_importable
from blocksparse.testing import assert_within_budget, make_qkv
from tests.machine import HOPPER
from tests.specs import asked, grid_of, not_none
from tests.stages import Shuffle

# cuDNN's block-sparse attention over our lists, by a stand-in with its contract


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, q2k_block_nums: Tensor, sparse_block_size: int,
    softmax_scale: float, allow_empty_block_nums: bool, pack_gqa: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The contract of `block_sparse_attention_forward` 1.32 as its documentation says it, row by row."""
    (B, H, M, _), size = q.shape, sparse_block_size
    assert index.dtype == q2k_block_nums.dtype == torch.int32
    assert index.shape[:3] == q2k_block_nums.shape == (B, H, M // size)
    assert allow_empty_block_nums
    assert not pack_gqa
    out, lse = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype), torch.full(q.shape[:3], float("-inf"))
    for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in index.shape[:3])).tolist():
        blocks = index[b, h, row, : q2k_block_nums[b, h, row]].long()
        if not len(blocks):
            continue
        at = (blocks[:, None] * size + torch.arange(size)).flatten()
        rows, head = slice(row * size, (row + 1) * size), h * k.shape[1] // H
        logits = q[b, h, rows].double() @ k[b, head, at].double().T * softmax_scale
        out[b, h, rows] = (logits.softmax(-1) @ v[b, head, at].double()).to(q.dtype)
        lse[b, h, rows] = logits.logsumexp(-1).float()
    return {"o_tensor": out, "lse_tensor": lse}


def traced(
    permuter: Any, selector: Any, *, block: int = 64, causal: bool = False, **sizes: Any
) -> bs.Trace[Any, Any, Any]:
    pipeline: Any = bs.Pipeline(permuter, bs.MeanPoolScorer(block), selector, bs.ReferenceExecutor())
    return pipeline.trace(*make_qkv(**sizes), causal=causal)  # type: ignore[no-any-return]


@pytest.mark.parametrize("permuter", [bs.Identity(), Shuffle()], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_the_lists_mean_the_mask(permuter: Any, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cudnn.block_sparse_attention")
    module.block_sparse_attention_forward = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", module)
    selector: Any = bs.Random(0.4)
    trace = traced(
        permuter, bs.SharedByGroup(selector) if shared else selector, M=128, N=256, B=2, Hq=4, Hkv=2, D=16
    )
    keep = trace.mask.keep.clone()
    keep[:, 0, 1] = False  # a row without blocks
    mask = evolve(trace.mask, keep=keep)
    got = packages.attend_by_cudnn(trace.q, trace.k, trace.v, mask, trace.spec.scale)
    want = bs.ReferenceExecutor()(trace.q, trace.k, trace.v, mask, trace.spec)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


def test_cudnn_says_every_reason() -> None:
    trace = bs.mean_pooling(block=32, executor=bs.ReferenceExecutor()).trace(*make_qkv(N=200))
    reasons = bs.CudnnExecutor().unsupported(trace.q, trace.k, trace.v, trace.mask, asked(trace.mask))
    assert [x for x in reasons if "cuDNN's frontend" not in x] == [
        "the kernel knows no causality; call with causal=False",
        "the kernel takes float16 and bfloat16, not torch.float32",
        "blocks must be 64 x 64 or 128 x 128, not 32 x 32",
        "queries and keys must fill whole blocks of 32 and 32",
        "the kernel is for NVIDIA GPUs, and these tensors are on cpu",
    ]
    with pytest.raises(ValueError, match=r"NVIDIA GPUs.*Use AutoExecutor\(\), or TritonExecutor\(\)"):
        evolve(bs.mean_pooling(), executor=bs.CudnnExecutor())(trace.q, trace.k, trace.v)


@pytest.mark.parametrize(
    ("major", "block", "dims", "kv_heads", "dtype", "count"),
    [
        (9, 64, (64, 96), 1, torch.float16, 0),
        (9, 128, (256, 128), 1, torch.float16, 1),
        (10, 64, (128, 128), 2, torch.bfloat16, 0),
        (10, 64, (64, 64), 1, torch.float16, 3),
        (11, 128, (96, 96), 1, torch.float16, 0),
        (10, 128, (64, 96), 1, torch.float16, 1),
        (12, 64, (128, 128), 1, torch.float16, 0),
        (12, 128, (64, 64), 1, torch.float16, 1),
    ],
)
def test_each_architecture_has_its_heads(
    major: int, block: int, dims: tuple[int, int], kv_heads: int, dtype: torch.dtype, count: int
) -> None:
    q, k, v = (
        torch.zeros(1, heads, 128, D, dtype=dtype)
        for heads, D in ((2, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
    )
    assert len(packages._wrong_heads(q, k, v, block, major)) == count


needs_cudnn = pytest.mark.skipif(
    not HOPPER or bool(not_importable("cudnn.block_sparse_attention", "cuDNN's frontend", "cudnn")),
    reason="needs compute capability 9.0 and nvidia-cudnn-frontend",
)


@needs_cudnn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (64, 64), (64, 96)])
@pytest.mark.parametrize("permuter", [bs.Identity(), Shuffle()], ids=str)
def test_cudnn_computes_what_the_mask_means(
    permuter: Any, D: int, Dv: int, block: int, dtype: torch.dtype
) -> None:
    """Grouped heads, rows of unlike length, and one without blocks."""
    q, k, v = make_qkv(B=2, M=384, N=640, Hq=4, Hkv=2, D=D, Dv=Dv, dtype=dtype, device="cuda")
    pipeline: Any = bs.Pipeline(permuter, bs.MeanPoolScorer(block), bs.Random(0.5), bs.ReferenceExecutor())
    trace = pipeline.trace(q, k, v, causal=False)
    keep = trace.mask.keep.clone()
    keep[:, 0, 1] = False
    mask = evolve(trace.mask, keep=keep)
    got = bs.CudnnExecutor()(q, k, v, mask, trace.spec)
    exact, yardstick = (
        bs.ReferenceExecutor()(q.to(d), k.to(d), v.to(d), mask, trace.spec) for d in (torch.float64, dtype)
    )
    assert_within_budget(got.out, exact.out, yardstick.out)
    torch.testing.assert_close(not_none(got.lse).double(), not_none(exact.lse), rtol=1e-3, atol=1e-3)
    assert torch.equal(bs.CudnnExecutor()(q, k, v, mask, trace.spec).out, got.out)


# flash-attn-4 over our lists


INSTALLED = not not_importable("flash_attn.cute", "flash-attn-4", "fa4")
RUNS = INSTALLED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10, 11)
needs_it = pytest.mark.skipif(not RUNS, reason="needs flash-attn-4 and a GPU that it has block-sparse kernels for")


trace_of = partial(traced, block=128, causal=True)


@pytest.mark.skipif(INSTALLED, reason="is installed")
def test_flash_attention_4_says_every_reason() -> None:
    trace = trace_of(bs.Identity(), bs.TopK(2), N=256)
    reasons = bs.FlashAttention4Executor().unsupported(trace.q, trace.k, trace.v, trace.mask, asked(trace.mask))
    assert reasons == [
        "flash-attn-4 is not installed (pip install -e '.[fa4]' in a checkout)",
        "the kernel takes float16 and bfloat16, not torch.float32",
        "the kernel is for NVIDIA GPUs, and these tensors are on cpu",
    ]
    with pytest.raises(ValueError, match=r"NVIDIA GPUs.*Use AutoExecutor\(\), or TritonExecutor\(\)"):
        evolve(bs.mean_pooling(), executor=bs.FlashAttention4Executor())(trace.q, trace.k, trace.v)


@pytest.mark.parametrize(
    ("hopper", "dims", "blocks", "count"),
    [
        (True, (128, 128), (128, 128), 0),
        (True, (64, 96), (64, 64), 0),
        (True, (256, 64), (128, 80), 0),
        (True, (256, 256), (128, 128), 1),
        (True, (128, 128), (32, 128), 1),
        (True, (128, 128), (128, 256), 1),
        (True, (100, 100), (128, 24), 2),
        (False, (128, 128), (256, 128), 0),
        (False, (128, 128), (128, 128), 1),
        (False, (192, 128), (256, 64), 2),
    ],
)
def test_it_names_sizes_without_tiles(
    hopper: bool, dims: tuple[int, int], blocks: tuple[int, int], count: int
) -> None:
    q, k, _ = make_qkv(N=300)
    grid = grid_of(q, k, blocks[0], blocks[1])
    mask = bs.BlockMask(grid.visible.expand(grid.batch, grid.q_heads, -1, -1), grid)
    assert len(packages._wrong_sizes(*dims, mask, hopper=hopper)) == count


def assert_equal(trace: bs.Trace[Any, Any, Any], mask: bs.BlockMask) -> None:
    """Output and lse of `mask` are the reference's, within the budget of the dtype."""

    def run(executor: bs.Executor[Any, Any], q: Tensor, k: Tensor, v: Tensor) -> bs.AttentionOutput:
        return executor(q, k, v, mask, asked(mask, trace.spec.scale))

    q, k, v = trace.q, trace.k, trace.v
    want = run(bs.ReferenceExecutor(), q.double(), k.double(), v.double())
    plain, got = run(bs.ReferenceExecutor(), q, k, v), run(bs.FlashAttention4Executor(), q, k, v)
    # The kernel rounds the weights to the dtype of the values, which the reference does not.
    budget = plain.out.double() + torch.finfo(got.out.dtype).eps * want.out.abs().amax()
    assert_within_budget(got.out, want.out, budget)
    torch.testing.assert_close(not_none(got.lse).double(), not_none(want.lse).double(), atol=2e-3, rtol=0)


@needs_it
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sizes", [{"N": 512}, {"N": 700, "M": 300, "Hq": 6}, {"N": 321, "B": 2}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("permuter", [bs.Identity(), bs.SegmentKeySort(256), Shuffle()], ids=repr)
def test_it_equals_the_reference(permuter: bs.Permuter[Any], causal: bool, sizes: dict[str, Any]) -> None:
    sizes = sizes | {"D": 128, "dtype": torch.bfloat16, "device": "cuda"}
    trace = trace_of(permuter, bs.TopK(share=0.5) | bs.Random(0.2), causal=causal, **sizes)
    assert_equal(trace, trace.mask)


@needs_it
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("D", "block"), [(64, 128), (128, 64), (96, 128), (256, 64)])
def test_it_equals_the_reference_at_other_sizes(D: int, block: int) -> None:
    trace = trace_of(
        bs.Identity(), bs.TopK(share=0.5), block=block, N=600, D=D, dtype=torch.float16, device="cuda"
    )
    assert_equal(trace, trace.mask.share_heads())


@needs_it
@pytest.mark.filterwarnings("default")
def test_a_row_with_nothing_kept_is_zero() -> None:
    trace = trace_of(bs.Identity(), bs.Everything(), N=512, D=128, dtype=torch.bfloat16, device="cuda")
    keep = trace.mask.keep.expand(1, 4, -1, -1).clone()
    keep[:, 1, 2] = False
    mask = bs.BlockMask(keep, trace.mask.grid)
    assert_equal(trace, mask)
    got = bs.FlashAttention4Executor()(trace.q, trace.k, trace.v, mask, asked(mask, trace.spec.scale))
    assert bool((got.out[:, 1, 256:384] == 0).all())


# One that is found and does not import is a reason, not an error


EXECUTORS = {
    "cudnn": (bs.CudnnExecutor(), "block_sparse_attention", "cuDNN's frontend with block sparsity"),
    "flash_attn": (bs.FlashAttention4Executor(), "cute", "flash-attn-4"),
}


@pytest.mark.parametrize("package", EXECUTORS)
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, " is not installed ("),
        ({"{}.py": ""}, " is not installed ("),  # a module of that name that is no package
        ({"{}/__init__.py": ""}, " is not installed ("),  # an older version
        (
            {"{}/__init__.py": "raise OSError('lib.so: cannot open')"},
            " cannot be imported (OSError: lib.so: cannot open;",
        ),
        ({"{}/__init__.py": "", "{}/{}.py": "import needed"}, " cannot be imported (No module named 'needed';"),
        ({"{}/__init__.py": "", "{}/{}.py": ""}, None),
    ],
)
def test_a_package_that_does_not_import_is_a_reason(
    package: str, files: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: bs.Executor[Any, Any]
    executor, module, title = EXECUTORS[package]
    q, k, v = make_qkv(N=128)
    trace = bs.mean_pooling(block=64, executor=bs.ReferenceExecutor()).trace(q, k, v, causal=False)
    for name, content in files.items():
        path = tmp_path / name.format(package, module)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # not what is installed
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    reasons = executor.unsupported(trace.q, trace.k, trace.v, trace.mask, trace.spec)
    assert [x[len(title) : len(title) + len(said or "")] for x in reasons if x.startswith(title)] == (
        [] if said is None else [said]
    )
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        del sys.modules[name]

"""The tables of 8 bits, index maps and servers' calls: what is timed computes what is said, figures are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from benchmarks import eight_bit_tables, gather_tables, run, s2o_tables, serving_table, whole_block_tables
from benchmarks.cases import EMPTY, FULL, ONE_BY_ONE, QUICK, TINY, Must, Served
from benchmarks.gpu_work import Work, summed
from benchmarks.inputs import Case, everything
from benchmarks.peers import DENSE_CHUNK, OURS
from benchmarks.report import Row, markdown
from benchmarks.timing import CannotRunError, WrongOutputError, check, check_near
from torch import Tensor
from torch._C._autograd import DeviceType

import blocksparse as bs
from blocksparse.kernels.common.tiles import HopperTiles
from blocksparse.testing import make_qkv
from tests.kernels.attention.references import int8_attention_reference
from tests.machine import GPU, needs_hopper
from tests.specs import asked, grid_of

PLAN = evolve(TINY, Hq=2, Hkv=1, budget_ms=1.0, densities=(0.5,), kernel_lengths=(128,), taus=(0.01, 0.5))


def figure_names(row: Row) -> set[str]:
    return {name for name, figure in row["figures"].items() if "ms" in figure}


def through_json(**tables: list[Row]) -> Row:
    results: Row = json.loads(json.dumps({"environment": {"torch": "2"}, "roofs": {}, "tables": tables}))
    return results


@pytest.mark.parametrize("wrong", ["one head", "not a number"])
def test_outputs_that_are_not_near_are_refused(wrong: str) -> None:
    want = torch.randn(1, 4, 10, 8)
    assert check_near(want * 1.01, want, tolerance=0.02) == pytest.approx(0.01, rel=1e-3)
    out = want.clone()
    out[:, 2] = float("nan") if wrong == "not a number" else out[:, 2] * 1.03
    with pytest.raises(WrongOutputError, match="head 2: relative L1"):
        check_near(out, want, tolerance=0.02)


def alike(ours: Any, its: Any) -> bool:
    """Equal, and objects that kernels take entry by entry."""
    if isinstance(its, Tensor):
        return torch.equal(ours.float(), its.float())
    if attrs.has(type(its)) and not isinstance(its, HopperTiles):
        return all(alike(getattr(ours, each.name), getattr(its, each.name)) for each in attrs.fields(type(its)))
    return bool(ours == its)


@pytest.mark.parametrize("fp8_pv", [True, False])
def test_the_8_bit_kernel_is_given_what_the_executor_gives_it(
    fp8_pv: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Operand by operand; and they stand for q, k and v."""
    case = Case(300, 4, 2, 64, 128, 128, 0.5, torch.bfloat16)
    q, k, v = case.inputs(torch.device(device))
    mask, scale, given = case.mask(q, k), 64**-0.5, []

    def op(*arguments: object, **named: object) -> tuple[Tensor, Tensor]:
        given.append((*arguments, *named.values()))
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr("blocksparse.execute.int8.int8_attention", op)
    monkeypatch.setattr(bs.Int8Executor, "unsupported", lambda *_: [])
    monkeypatch.setattr(bs.Int8Executor, "_hopper_reasons", lambda *_: [])
    bs.Int8Executor(fp8_pv)(q, k, v, mask, asked(mask, scale))
    arguments = eight_bit_tables.kernel_arguments(q, k, v, mask, fp8_pv)
    for ours, its in zip(arguments.values(), given[0], strict=True):
        assert alike(ours, its)
    want = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, scale)).out
    tolerance = eight_bit_tables.TOLERANCE["fp8" if fp8_pv else "bf16"]
    check_near(int8_attention_reference(**arguments)[0], want, tolerance=tolerance)


def test_8_bits_are_measured_beside_the_kernel(device: str) -> None:
    (row,) = eight_bit_tables.eight_bit(PLAN, torch.device(device))
    assert OURS in figure_names(row)
    assert row["density"] > 0
    assert "float16" in row["figures"]["fp8 call"]["why"]  # TINY is float32
    exact = {OURS, eight_bit_tables.EXACT_CALL}
    assert set(row["figures"]) == {*exact, "fp8 call", "fp8 kernel", "bf16 call", "bf16 kernel"}


def test_wrong_8_bits_are_not_timed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """What is exact passes, what is off by too much for bf16 values does not; then rounding is timed too."""

    def pretended(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> Callable[[], Tensor]:
        out = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, q.shape[-1] ** -0.5)).out
        return lambda: out * 1.03

    for name in ("executor_call", "int8_kernel_call"):
        monkeypatch.setattr(eight_bit_tables, name, pretended)
    plan = evolve(PLAN, D=64)
    (row,) = eight_bit_tables.eight_bit(plan, torch.device(device))
    exact = {OURS, eight_bit_tables.EXACT_CALL}
    assert figure_names(row) == {*exact, "fp8 call", "fp8 kernel", "fp8 rounding", "bf16 rounding"}
    assert row["l1"]["fp8"] == pytest.approx(0.03, rel=0.01)
    text = markdown(through_json(eight_bit=[row]))
    assert "| 128 |" in text
    assert "| 0.0300 |" in text
    failed = run.wrong(through_json(eight_bit=[row]))
    assert len(failed) == 2
    assert all("head" in why for why in failed)


def test_calls_in_whole_blocks_are_measured_beside_cudnn(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Who cannot run says why, and what is wrong is not timed."""

    def pretended(
        qkv: tuple[Tensor, Tensor, Tensor], mask: bs.BlockMask, spec: bs.AttentionSpec, splits: int | str
    ) -> Callable[[], Tensor]:
        out = bs.ReferenceExecutor()(*qkv, mask, spec).out
        return lambda: out * (1.2 if splits == "auto" else 1.0)

    plan = evolve(PLAN, whole_blocks=((2, 128, 32, 32, 3),))
    (row,) = whole_block_tables.whole_blocks(plan, torch.device(device))
    assert whole_block_tables.OURS in figure_names(row)
    assert "not installed" in row["figures"][whole_block_tables.CUDNN]["why"]
    assert row["tflop"] == pytest.approx(4e-12 * 32 * 2 * 4 * 3 * 32 * 32)
    monkeypatch.setattr(whole_block_tables, "cudnn_call", pretended)
    (row,) = whole_block_tables.whole_blocks(plan, torch.device(device))
    assert figure_names(row) >= {whole_block_tables.OURS, whole_block_tables.CUDNN}
    assert row["figures"][whole_block_tables.SPLIT]["why"].startswith("WrongOutputError")
    assert "| 2 | 128 | 32 | 32 | 3 of 4 |" in markdown(through_json(whole_blocks=[row]))


def test_as_many_blocks_are_gathered_as_lie_side_by_side() -> None:
    torch.manual_seed(0)
    q, k, _ = make_qkv(N=256, D=16, Hq=4, Hkv=2)
    permutation = gather_tables.random_maps(256, 4, 64, 48, q.device)
    assert permutation.k_index is not None
    for g in range(4):
        own, early = permutation.k_index[0, 1, g].split([64, 48])
        assert torch.equal(own, torch.arange(64 * g, 64 * g + 64, dtype=torch.int32))
        early = early[early >= 0]
        assert len(early.unique()) == min(48, 64 * g)
        assert bool((early < 64 * g).all())
    scores = bs.NoScorer(16)(q, k, permutation, bs.AttentionSpec(scale=0.25))
    mask = bs.Ranked(bs.Everything())(scores)
    beside = gather_tables.scattered(q, k, mask)
    assert torch.equal(beside.keep.sum(-1), mask.keep.sum(-1))
    assert bool((beside.keep | ~beside.grid.diagonal).all())
    assert bool((beside.grid.visible | ~beside.keep).all())


@pytest.mark.slow
def test_gather_has_what_its_table_needs(device: str) -> None:
    rows = list(gather_tables.gather(PLAN, torch.device(device)))
    assert [row["maps"] for row in rows] == [1, 2]
    for row in rows:
        assert figure_names(row) == {OURS, "gather", "portable gather", "GatherExecutor"}
        assert row["tflop"] == pytest.approx(4e-12 * 32 * 3 * 64 * 64 * 2)
    text = markdown(through_json(gather=rows))
    assert "gather / contiguous" in text
    assert "| 128 | 2 | 1.000 |" in text


def test_dense_rows() -> None:
    q, k, v = make_qkv(N=70, M=50, D=16, Hq=4, Hkv=2)
    at = torch.tensor([0, 7, 49, 7])
    mask = bs.BlockMask(torch.ones(1, 4, 1, 1, dtype=torch.bool), grid_of(q, k, 128))
    want = bs.ReferenceExecutor()(q, k, v, mask, asked(mask, 0.25)).out
    torch.testing.assert_close(s2o_tables.dense_rows(q, k, v, at).float(), want[:, :, at], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_s2o_has_what_its_table_needs() -> None:
    rows = list(s2o_tables.s2o(evolve(PLAN, kernel_lengths=(128, 256)), torch.device("cpu")))
    methods = ["default", "exact, all keys", "S=64, block 64, per query head", "S=64, block 64, per KV head"]
    assert [row["method"] for row in rows if row["N"] == 128] == methods
    assert [row["tau"] for row in rows if row["N"] == 256] == [0.01, 0.01, 0.5, 0.01, 0.5]
    for row in rows:
        assert figure_names(row) >= {"index", "rank", "attend", "whole call"}
        assert row["density"] > 0
    by_tau = {row["tau"]: row for row in rows if row["N"] == 256 and "query" in row["method"]}
    assert by_tau[0.5]["density"] <= by_tau[0.01]["density"]
    assert by_tau[0.5]["l1"] >= by_tau[0.01]["l1"]
    assert "per KV head | 0.5 |" in markdown(through_json(s2o=rows))


@needs_hopper
def test_8_bits_on_hopper() -> None:
    plan = evolve(
        PLAN, dtype=torch.bfloat16, D=128, blocks=((128, 128),), kernel_lengths=(1024,), densities=(0.5,)
    )
    (row,) = eight_bit_tables.eight_bit(plan, torch.device("cuda"))
    assert len(figure_names(row)) == 8
    assert row["l1"]["bf16"] < row["l1"]["fp8"]


# ---- serving

TOKENS = 64
SERVED = Served(2, 1, (TOKENS, 100), D=32, page_sizes=(16,), must=(Must("pbs_attn", 0.95, ONE_BY_ONE),))


def test_a_batch_is_one_call_of_all_prompts(device: str) -> None:
    """Packed and paged calls are checked prompt by prompt, and prompts that changed places do not pass."""
    plan, where = evolve(PLAN, presets=TINY.presets), torch.device(device)
    batch = serving_table.Batch.of(evolve(SERVED, must=()), plan, where)
    assert batch.q.shape == (1, 2, TOKENS + 100, 32)
    pipeline = serving_table._pipelines(SERVED, plan)["pbs_attn"]
    candidate, visited = batch.candidate(pipeline), serving_table._visited(pipeline)
    out = candidate.build()()
    candidate.verify(out)
    batch.check(batch.each(lambda q, k, v: lambda: pipeline(q, k, v))(), visited)
    assert torch.equal(serving_table._paged(batch, 16, pipeline)(), out)
    with pytest.raises(WrongOutputError):
        candidate.verify(torch.cat((out[:, :, 100:], out[:, :, :100]), 2))


def test_the_last_queries_of_a_prompt(device: str) -> None:
    case = Served(4, 2, (150,), queries=40, D=32, Dv=16)
    batch = serving_table.Batch.of(case, PLAN, torch.device(device))
    assert [tuple(x.shape) for x in batch.prompts[0]] == [(1, 4, 40, 32), (1, 2, 150, 32), (1, 2, 150, 16)]
    assert batch.sequences is None


@pytest.mark.parametrize("name", ["cuDNN dense", "FA2 dense"])
def test_dense_attention_of_the_last_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's two calls are merged; its kernel is stood for by the one for CPUs."""

    def stands_for(
        q: Tensor, k: Tensor, v: Tensor, _: None, lse: bool, p: float, causal: bool, scale: float
    ) -> Any:
        assert lse
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attend(q, k, v, p, causal, scale=scale)
        return out, sums.unsqueeze(-1)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", stands_for)
    q, k, v = make_qkv(N=150, M=40, D=16, Hq=4, Hkv=2)
    check(DENSE_CHUNK[name](q, k, v)(), q, k, v, everything(q, k, block=32), samples=20)


def test_kernels_of_a_profile() -> None:
    """Times of repeats are shared out; what ran on the CPU and annotations do not count."""

    def event(name: str, us: float, device: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
        elapsed = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=device, time_range=elapsed, is_user_annotation=annotation)

    once = [event("short", 100.0), event("short", 300.0), event("long", 1600.0)]
    others = [event("cudaLaunchKernel", 9.0, DeviceType.CPU), event("step", 5000.0, annotation=True)]
    assert summed([*once, *once, *others], 2) == Work(2.0, 3, {"long": (1, 1.6), "short": (2, 0.4)})
    with pytest.raises(CannotRunError, match="no kernel"):
        summed(others, 1)


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="it is tried on a CPU, where kernels are interpreted")
def test_serving_has_what_its_table_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nobody counts kernels, and every row still says what it can."""
    monkeypatch.setattr(serving_table, "EMPTY_LAUNCHES", 1)
    broken = Served(2, 1, (0,), D=16, graph=True)  # no tokens
    single = Served(2, 1, (TOKENS,), D=32, stages=True, graph=True)
    plan = evolve(PLAN, presets=TINY.presets, serving=(broken, single, SERVED))
    rows = list(serving_table.serving(plan, torch.device("cpu")))
    parts = [*["calls"] * 3, *["graph"] * 2, "launches", "launches", *["stages"] * 2, "launches"]
    assert [row["part"] for row in rows] == parts
    failed, alone, packed, *_ = rows
    assert "figures" not in failed
    assert "why" in failed
    ours = {"pbs_attn", "mean_pooling", "AutoExecutor", "auto"}
    assert figure_names(alone) == {"FA2 dense", *ours}
    assert figure_names(packed) == {"FA2 dense", *ours, ONE_BY_ONE, "pbs_attn, pages of 16"}
    assert all(alone["figures"][name][time] > 0 for name in ours for time in ("host_ms", "empty_ms"))
    assert all("GPUs" in figure["why"] for row in rows[6:] for figure in row["figures"].values())
    for case in (*FULL.serving, *QUICK.serving, *TINY.serving):
        pages = {f"pbs_attn, pages of {size}" for size in case.page_sizes}
        for must in case.must:
            assert must.figure in ours | pages
            assert must.over in ("dense", EMPTY) or len(case.keys) > 1
    text = markdown(through_json(serving=rows))
    assert "| 2/1 heads, 64, head dim 32 |" in text
    assert "| 2/1 heads, 64 + 100, head dim 32 | pbs_attn, pages of 16 |" in text

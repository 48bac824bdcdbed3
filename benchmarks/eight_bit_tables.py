"""The table `eight_bit`: `Int8Executor` against the bf16 kernel on the masks of `rates`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from benchmarks.cases import Plan
from benchmarks.inputs import Case
from benchmarks.kernel_tables import Row, density_of, pairs_kept
from benchmarks.peers import OURS, kernel_call
from benchmarks.timing import (
    Call,
    Candidate,
    CannotRunError,
    attempt,
    check,
    check_near,
    measure,
    medians,
    ready,
    release,
    some_rows,
)
from blocksparse.execute.int8 import tile_operands
from blocksparse.execute.launched import BlockPlan
from blocksparse.kernels.attention.sparse_attention import int8_attention
from blocksparse.kernels.common.tiles import tuned_int8
from blocksparse.kernels.quantize.tile_operands import TileOperands

Arguments = dict[str, Any]

EXACT_CALL = f"{OURS} call"  # lists included, as in the calls of 8 bits

# The precision of weights and values, and how far an output may be from bf16's: relative L1, of any head.
TOLERANCE = {"fp8": 0.05, "bf16": 0.02}


def eight_bit(plan: Plan, device: torch.device) -> Iterator[Row]:
    """8-bit attention, whole calls, kernels and rounding, beside bf16; kernels have their lists beforehand."""
    for N in plan.kernel_lengths:
        for density in plan.densities:
            case = Case(N, plan.Hq, plan.Hkv, plan.D, *plan.blocks[0], density, plan.dtype)
            yield attempt({"N": N, "D": plan.D}, partial(_row_of, case, device, plan.budget_ms))


def _row_of(case: Case, device: torch.device, budget_ms: float) -> Row:
    release(device)
    q, k, v = case.inputs(device)
    mask, at = case.mask(q, k), some_rows(case.N, device)
    verify = partial(check, q=q, k=k, v=v, mask=mask)
    exact = kernel_call(q, k, v, mask)
    out = exact()
    verify(out)
    want, errors = out[:, :, at], dict[str, float]()
    candidates = {OURS: Candidate(ready(exact), verify)}
    candidates[EXACT_CALL] = Candidate(partial(exact_call, q, k, v, mask), verify)
    roundings: dict[str, Callable[[], object]] = {}
    for values, tolerance in TOLERANCE.items():
        near = _Near(values, at, want, tolerance, errors)
        candidates[f"{values} call"] = Candidate(partial(executor_call, q, k, v, mask, values == "fp8"), near)
        candidates[f"{values} kernel"] = Candidate(partial(int8_kernel_call, q, k, v, mask, values == "fp8"), near)
        roundings[f"{values} rounding"] = partial(rounded, q, k, v, mask, values == "fp8")
    figures = measure(candidates, device=device, budget_ms=budget_ms)
    if any(figures[f"{values} call"].ms is not None for values in TOLERANCE):
        # Bound by memory: the chip's clock does not depend on what ran just before, and less time will do.
        figures |= medians(roundings, device=device, budget_ms=budget_ms / 3)
    return {
        "density": density_of(mask),
        "tflop": 4e-12 * case.D * pairs_kept(mask),
        "l1": errors,
        "figures": {name: figure.as_row() for name, figure in figures.items()},
    }


@frozen(eq=False)
class _Near:
    """Checks sampled rows, and remembers how near they are."""

    name: str
    at: Tensor
    want: Tensor
    tolerance: float
    errors: dict[str, float]

    def __call__(self, out: Tensor) -> None:
        self.errors[self.name] = check_near(out[:, :, self.at], self.want, tolerance=self.tolerance)


def exact_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> Call:
    """`TritonExecutor`, block lists included."""
    executor, scale = bs.TritonExecutor(), q.shape[-1] ** -0.5
    return lambda: executor(q, k, v, mask, bs.AttentionSpec(scale=scale)).out


def executor_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> Call:
    """`Int8Executor`, block lists and rounding included."""
    executor, scale = on_hopper(q, mask, fp8_pv), q.shape[-1] ** -0.5
    _refuse_unsupported(q, k, v, mask, fp8_pv)
    return lambda: executor(q, k, v, mask, bs.AttentionSpec(scale=scale)).out


def int8_kernel_call(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> Call:
    """The kernel alone, all it reads made beforehand."""
    _refuse_unsupported(q, k, v, mask, fp8_pv)
    arguments = kernel_arguments(q, k, v, mask, fp8_pv)
    return lambda: int8_attention(**arguments)[0]


def _refuse_unsupported(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> None:
    if reasons := on_hopper(q, mask, fp8_pv).unsupported(
        q, k, v, mask, bs.AttentionSpec(scale=q.shape[-1] ** -0.5)
    ):
        raise CannotRunError("; ".join(reasons))


def on_hopper(q: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> bs.Int8Executor:
    """The executor with the kernel for Hopper and its fastest tiles."""
    tiles = tuned_int8(q.shape[-1], mask.grid.q_block, mask.grid.k_block, fp8_pv)
    return bs.Int8Executor(fp8_pv, tiles=tiles)


def rounded(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> TileOperands:
    """What `Int8Executor` does before its kernel, lists aside."""
    grid, D = mask.grid, q.shape[-1]
    piece = min(grid.k_block, tuned_int8(D, grid.q_block, grid.k_block, fp8_pv).block_n)
    return tile_operands(q, k, v, bs.GlobalPermutation(), grid, piece, scale=D**-0.5, smooth_k=True, fp8=fp8_pv)


def kernel_arguments(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask, fp8_pv: bool) -> Arguments:
    """What `int8_attention` takes, for a mask in original order."""
    grid, plan, D = mask.grid, BlockPlan.of(mask), q.shape[-1]
    return {
        "operands": rounded(q, k, v, mask, fp8_pv),
        "lists": plan,
        "positions": grid.positions,
        "tiles": tuned_int8(D, grid.q_block, grid.k_block, fp8_pv),
        "scale": D**-0.5,
        "pv_skip": None,
        "out_dtype": v.dtype,
    }

"""Attention at the shapes of video models, dense and sparse, one GPU: `python -m benchmarks.video`.

For each shape: whole calls, choosing and attending apart, cuDNN's block-sparse kernel on the same masks where
`nvidia-cudnn-frontend` is there, and a loop of denoising steps in which blocks are chosen once and then kept. Each
output is checked before anything is timed. Tokens are made up: a video that is smooth in space and time comes out
of noise step by step, so errors tell methods apart and say nothing about clips. A CPU tries it: `--shapes toy`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention

import blocksparse as bs
from benchmarks.inputs import QKV
from benchmarks.timing import ROUNDS, CannotRunError, attempt, check, check_near, medians, relative_l1, some_rows
from blocksparse.hosts.token_layout import placed
from blocksparse.kernels.attention.mean_correction import add_mean_correction
from blocksparse.kernels.masks.arguments import KeptBlocks
from blocksparse.layers.reused_mask import MaskCache, ReusedMask
from blocksparse.tools.bench import repeated

AnyPipeline = bs.Pipeline[Any, Any, Any]
EXACT = bs.AutoExecutor(dense_below=0)
ROUNDED = 0.1  # what 8 bits may err in an attended row, of its norm; exact kernels 1e-2


@frozen
class Shape:
    """Self-attention of a model: a video's grid in tokens, the tokens that are kept beside it, and the heads."""

    grid: tuple[int, int, int]
    kept: int
    heads: int
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return prod(self.grid) + self.kept


SHAPES = {
    # One of 8 ranks; frames of 768 x 1344 are 24 x 42 tokens, and what is left of the lengths that others report
    # is taken for text and sound.
    "MiniMax-H3, 5 s": Shape((37, 24, 42), 504, 7),
    "MiniMax-H3, 10 s": Shape((75, 24, 42), 176, 7),
    "MiniMax-H3, 15 s": Shape((108, 24, 42), 768, 7),
    "Wan 2.1 14B, 720p": Shape((21, 45, 80), 0, 40),  # 81 frames
    "HunyuanVideo, 720p": Shape((33, 45, 80), 256, 24),  # 129 frames
    "LTX-2, 1536 x 1024": Shape((16, 32, 48), 0, 32),  # 121 frames
    "toy": Shape((4, 16, 16), 40, 2, 64),
}


def methods(share: float, deviations: float = 0.0, *, rounds: bool) -> dict[str, AnyPipeline]:
    """Pipelines that keep this share of the blocks, by name; blocks of 64 but where it is said.

    Args:
        deviations: above the mean, from which on `sol_attn` keeps this share.
        rounds: with those in 8 bits, which are for GPUs.
    """
    order = bs.HilbertOrder()
    made: dict[str, AnyPipeline] = {
        "subblock": bs.subblock(share, order=order, executor=EXACT),
        "subblock, model's order": bs.subblock(share, executor=EXACT),
        "sol_attn, model's order": bs.sol_attn(deviations, executor=EXACT),
        "sparge": bs.sparge(share=share, block=64, order=order, executor=EXACT),
        "sparge, 128 x 64": bs.sparge(share=share, order=order, executor=EXACT),
        "sparge, 128 x 128": bs.sparge(share=share, k_block=128, order=order, executor=EXACT),
    }
    if rounds:
        eight = bs.Int8Executor()
        made["subblock, 8 bits"] = bs.subblock(share, order=order, executor=eight)
        made["sparge, 8 bits"] = bs.sparge(share=share, block=64, order=order, executor=eight)
        made["sparge, 128 x 128, 8 bits"] = bs.sparge(share=share, k_block=128, order=order, executor=eight)
    return made


def deviations_for(share: float, q: Tensor, k: Tensor) -> float:
    """The greatest `tau`, to a hundredth or so, with which `sol_attn` keeps this share of the blocks of a call."""
    low, high = -4.0, 8.0
    for _ in range(10):
        tau = (low + high) / 2
        kept = float(bs.sol_attn(tau).choose(q, k, causal=False).mask.density().mean())
        low, high = (tau, high) if kept >= share else (low, tau)
    return low


class Denoising:
    """The tokens of each step of a run: a smooth video comes out of noise, seen by the same projections."""

    def __init__(self, shape: Shape, steps: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.steps, self.dtype = shape, steps, dtype
        coarse = torch.randn(1, 32, *(-(-size // 6) + 1 for size in shape.grid), device=device)
        video = interpolate(coarse, shape.grid, mode="trilinear", align_corners=True)[0].flatten(1).T
        others = torch.randn(shape.kept, 32, device=device)
        self.clean = torch.cat((video, others)) + 0.1 * torch.randn(shape.tokens, 32, device=device)
        self.noise = torch.randn_like(self.clean)
        of_k, own, of_v = torch.randn(3, shape.heads, 32, shape.head_dim, device=device) / 32**0.5
        self.projections = 2 * of_k + own, of_k, of_v  # queries look for keys like themselves

    def at(self, step: int) -> QKV:
        """`q`, `k`, `v` `[1, heads, tokens, D]` of a step; from the first to the last, noise goes from .5 to 0."""
        noisy = 0.5 * (1 - step / max(self.steps - 1, 1))
        features = ((1 - noisy) * self.clean + noisy * self.noise).to(self.dtype)
        q, k, v = (features @ x.to(self.dtype) for x in self.projections)
        return q[None], k[None], v[None]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cuDNN's attention on a GPU, PyTorch's on a CPU."""
    if not q.is_cuda:
        return scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def cudnn_sparse(q: Tensor, k: Tensor, v: Tensor, mask: bs.BlockMask) -> Callable[[], Tensor]:
    """cuDNN's block-sparse kernel on these blocks; tokens are put in order, and lists are made, beforehand.

    Raises:
        CannotRunError: it is not installed, or has no kernel for these blocks.
    """
    try:
        from cudnn.block_sparse_attention import block_sparse_attention_forward
    except ImportError:
        raise CannotRunError("nvidia-cudnn-frontend with block-sparse attention is not installed") from None
    grid = mask.grid
    if grid.q_block != grid.k_block or grid.q_block not in (64, 128):
        raise CannotRunError(f"no kernel for blocks of {grid.q_block} x {grid.k_block}")
    order, block, tokens = grid.permutation, grid.q_block, q.shape[2]
    assert isinstance(order, bs.GlobalPermutation)
    filled = -tokens % block
    in_slots = order.gather_queries(q), order.gather_keys(k), order.gather_keys(v)
    padded = [pad(x, (0, 0, 0, filled)).contiguous() for x in in_slots]
    counts = mask.keep.sum(-1, dtype=torch.int32)
    kept_first = mask.keep.int().sort(dim=-1, descending=True, stable=True).indices
    index = kept_first[..., : int(counts.max())].int().contiguous()
    real = torch.full((grid.cols,), block, dtype=torch.int32, device=q.device)
    real[-1] = block - filled
    run = partial(
        block_sparse_attention_forward, *padded, index, q2k_block_nums=counts, block_sizes=real,
        sparse_block_size=block, kv_splits="auto", allow_empty_block_nums=True,
    )  # fmt: skip

    def call() -> Tensor:
        out: Tensor = run()["o_tensor"]
        return order.restore(out[:, :, :tokens])

    return call


def with_means(pipeline: AnyPipeline) -> AnyPipeline:
    """The same, whose blocks that are not kept take part by their means."""
    return evolve(pipeline, executor=bs.MeanCorrectionExecutor(pipeline.executor))


def plain_means(pipeline: AnyPipeline, q: Tensor, k: Tensor, v: Tensor, choice: bs.Choice[Any]) -> Tensor:
    """What that gives for a choice, by plain torch."""
    exact, grid = pipeline.attend(q, k, v, choice), choice.mask.grid
    assert exact.lse is not None
    order: Any = grid.permutation
    kept = KeptBlocks(choice.mask.keep, grid, order.q_index, order.key_slots)
    out, _ = add_mean_correction(q, k, v, exact.out, exact.lse, kept, scale=choice.spec.scale)
    return out


def measure(pipeline: AnyPipeline, run: Denoising, device: torch.device, budget_ms: float) -> dict[str, Any]:
    """Milliseconds of a call, of its two halves, and of attending with means of what is not kept, or by cuDNN.

    All are of the same mask, and of the tokens of the last step.
    """
    q, k, v = run.at(run.steps - 1)
    trace = pipeline.trace(q, k, v, causal=False)
    tolerance = ROUNDED if isinstance(pipeline.executor, bs.Int8Executor) else 1e-2
    check(trace.output.out, q, k, v, trace.mask, tolerance=tolerance)
    density, mask = float(trace.density().mean()), trace.mask
    del trace
    choice, means = pipeline.choose(q, k, causal=False), with_means(pipeline)
    check_near(means.attend(q, k, v, choice).out, plain_means(pipeline, q, k, v, choice), tolerance=1e-2)
    calls: dict[str, Callable[[], object]] = {
        "call": partial(pipeline, q, k, v, causal=False),
        "choose": partial(pipeline.choose, q, k, causal=False),
        "attend": partial(pipeline.attend, q, k, v, choice),
        "means": partial(means.attend, q, k, v, choice),
        "dense": partial(dense, q, k, v),
    }
    found: dict[str, Any] = {"density": density}
    try:
        its = cudnn_sparse(q, k, v, mask)
        check(its(), q, k, v, mask)
        calls["cudnn_sparse"] = its
    except Exception as error:  # who cannot run is a note that says why
        found["cudnn_why"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    figures = medians(calls, device=device, budget_ms=budget_ms)
    return found | {f"{name}_ms": figure.ms for name, figure in figures.items()}


def dense_step(run: Denoising, device: torch.device) -> float:
    """Milliseconds per step of a run in which all are dense."""
    dense(*run.at(0))
    times = [repeated(partial(dense, *run.at(step)), 1, device)[0] for step in range(run.steps)]
    return statistics.fmean(times)


def loop(pipeline: AnyPipeline, run: Denoising, device: torch.device) -> dict[str, Any]:
    """Milliseconds per step of a run whose `ReusedMask` is chosen in the first step, and of attending alone.

    *old* is the relative L1 distance from dense attention in the last step with the first one's blocks, *fresh*
    with blocks that are chosen there, and *mean* with means of the others as well.
    """
    q, k, v = run.at(0)
    choice = pipeline.choose(q, k, causal=False)
    keeping, attending = (list[list[float]]() for _ in range(2))
    for _ in range(ROUNDS):
        cache = MaskCache(run.steps)
        reused = ReusedMask(pipeline, 0, 0, cache)
        for times in (keeping, attending):
            times.append([])
        for step in range(run.steps):
            q, k, v = run.at(step)
            cache.begin(step)
            keeping[-1] += repeated(partial(reused, q, k, v, causal=False), 1, device)
            attending[-1] += repeated(partial(pipeline.attend, q, k, v, choice), 1, device)
    step_ms, attend_ms = (statistics.median(map(statistics.fmean, rounds)) for rounds in (keeping, attending))
    rows = some_rows(run.shape.tokens, device)
    want = dense(q, k, v)[:, :, rows]
    kept, anew, approximated = (
        float(relative_l1(x[:, :, rows], want).mean())
        for x in (
            pipeline.attend(q, k, v, choice).out,
            pipeline(q, k, v, causal=False),
            with_means(pipeline)(q, k, v, causal=False),
        )
    )
    return {
        "step_ms": step_ms,
        "step_attend_ms": attend_ms,
        "old": kept,
        "fresh": anew,
        "mean": approximated,
    }


COLUMNS = ("call", "choose", "attend", "means", "cudnn_sparse", "step")


def table(name: str, shape: Shape, rows: list[dict[str, Any]]) -> str:
    """A line per method: milliseconds, and what share of dense attention's time a call and a step take."""
    lines = [
        f"\n{name}: {shape.tokens} tokens {shape.grid} + {shape.kept}, {shape.heads} heads of {shape.head_dim}",
        f"{'method':<26} density     dense      call of dense    choose    attend     means  "
        "of attending     cuDNN  step, kept  of dense  of attending   fresh    mean     old",
    ]
    for row in rows:
        if "why" in row:
            lines.append(f"{row['method']:<26} {row['why']}")
            continue
        ms = {
            column: f"{row[f'{column}_ms']:10.2f}" if row.get(f"{column}_ms") else f"{'-':>10}"
            for column in COLUMNS
        }
        lines.append(
            f"{row['method']:<26} {row['density']:7.3f}{row['dense_ms']:10.2f}{ms['call']}"
            f"{row['call_ms'] / row['dense_ms']:9.3f}{ms['choose']}{ms['attend']}{ms['means']}"
            f"{row['means_ms'] / row['attend_ms']:14.3f}{ms['cudnn_sparse']}"
            f"{ms['step']:>12}{row['step_ms'] / row['step_dense_ms']:10.3f}"
            f"{row['step_ms'] / row['step_attend_ms']:14.3f}{row['fresh']:8.4f}{row['mean']:8.4f}{row['old']:8.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    real = [name for name in SHAPES if name != "toy"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=real if device.type == "cuda" else ["toy"])
    parser.add_argument("--methods", nargs="+", choices=methods(0.5, rounds=True), help="all if left out")
    parser.add_argument("--share", type=float, default=0.25, help="of a row's blocks, that are kept")
    parser.add_argument("--steps", type=int, default=12, help="of the loop")
    parser.add_argument("--budget-ms", type=float, default=1500, help="for the repeats of each call")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {}
    for name in options.shapes:
        torch.manual_seed(0)
        shape = SHAPES[name]
        run, rows = Denoising(shape, options.steps, device, dtype), []
        densely = {"step_dense_ms": dense_step(run, device)}
        q, k, _ = run.at(options.steps - 1)
        deviations = deviations_for(options.share, q, k)
        for method, pipeline in methods(options.share, deviations, rounds=device.type == "cuda").items():
            if options.methods and method not in options.methods:
                continue
            on_grid: Any = placed(pipeline, (shape.grid,), shape.kept, device)

            def work(on_grid: AnyPipeline = on_grid, run: Denoising = run) -> dict[str, Any]:
                return measure(on_grid, run, device, options.budget_ms) | loop(on_grid, run, device)

            rows.append(attempt({"method": method} | densely, work))
        print(table(name, shape, rows), flush=True)
        for row in rows:
            if "cudnn_why" in row:
                print(f"cuDNN on the mask of {row['method']}: {row['cudnn_why']}", flush=True)
        found[name] = rows
        if options.json:  # after each shape, since some take minutes
            options.json.write_text(json.dumps(_told(options, device) | {"shapes": found}, indent=1))


def _told(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What was asked for, and what it ran on."""
    on = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    chosen = {name: x for name, x in vars(options).items() if name != "json"}
    return {"options": chosen, "versions": {"torch": torch.__version__, "device": on}}


if __name__ == "__main__":
    with torch.no_grad():
        main()

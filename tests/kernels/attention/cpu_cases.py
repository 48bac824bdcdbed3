"""Generated cases of the compiled CPU kernel against float64: `python -m tests.kernels.attention.cpu_cases --cases 10000`.

With sanitizers, once for memory and undefined behaviour and once for threads:

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m \
        tests.kernels.attention.cpu_cases --flags "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    LD_PRELOAD=$(g++ -print-file-name=libtsan.so) python -m \
        tests.kernels.attention.cpu_cases --flags "-O1 -g -fsanitize=thread" --own-threads

The last one knows nothing of PyTorch and OpenMP: TSAN_OPTIONS=suppressions=FILE, of the lines "called_from_lib:libtorch_cpu.so"
and "called_from_lib:libgomp.so.1", leaves out what it takes these for. Two warnings of PyTorch's own import and exit remain.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.attention import cpu_attention
from blocksparse.kernels.attention.gather_attention import gather_attention_reference
from blocksparse.kernels.common import compiled
from blocksparse.kernels.common import compiled as cpu_calls
from blocksparse.kernels.masks.arguments import LogitChange, RankedLists, StopRule
from blocksparse.kernels.masks.grid import TokenPositions
from blocksparse.kernels.select.top_k import visiting_order
from tests.drawn import LAYOUTS
from tests.meaning import pairs_of
from tests.specs import grid_of

BLOCKS = 1, 7, 16, 32, 48, 64, 96, 128, 160, 256, 1000
WIDTHS = 1, 2, 7, 16, 31, 32, 40, 64, 80, 96, 128, 200, 256
DTYPES = torch.float32, torch.bfloat16, torch.float16


@frozen(eq=False)
class Case:
    """Inputs of one call, all drawn from one number."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: cpu_attention.Kept
    positions: TokenPositions
    mask: bs.BlockMask
    permutation: bs.Permutation
    change: LogitChange
    scale: float
    about: str


SOME_LAYOUTS = ("plain", "plain", "tokens before heads", "head dim not innermost", "part of a cache", "odd rows")


def case(seed: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    B, Hkv = draw.choice((1, 1, 2)), draw.choice((1, 2, 3))
    Hq, N = Hkv * draw.choice((1, 1, 2, 3)), draw.choice((draw.randint(1, 40), draw.randint(1, 500)))
    causal = draw.random() < 0.75
    M = draw.choice((N, draw.randint(1, N))) if causal else draw.choice((N, draw.randint(1, 300)))
    D, Dv, dtype = draw.choice(WIDTHS), draw.choice(WIDTHS), draw.choice(DTYPES)
    Dv = draw.choice((D, Dv))
    q, k, v = (
        LAYOUTS[draw.choice(SOME_LAYOUTS)](torch.randn(B, H, n, d).to(dtype))
        for H, n, d in ((Hq, M, D), (Hkv, N, D), (Hkv, N, Dv))
    )
    q_block, k_block = draw.choice(BLOCKS), draw.choice(BLOCKS)
    window = draw.choice((None, None, draw.randint(1, N))) if causal else None
    permutation = _permutation(draw, q, k, q_block, causal)
    grid = grid_of(q, k, q_block, k_block, permutation=permutation, causal=causal, window=window)
    if draw.random() < 0.3 and permutation.q_index is None and grid.k_position.shape[1] <= Hkv:
        grid = grid.shared()
    heads = Hkv if grid.visible.shape[1] == Hkv or draw.random() < 0.3 else Hq
    keep = (
        (torch.rand(B, heads, grid.rows, grid.cols) < draw.choice((0.1, 0.4, 1.0))) & grid.shared().visible
        if heads != Hq
        else (torch.rand(B, Hq, grid.rows, grid.cols) < draw.choice((0.1, 0.4, 1.0))) & grid.visible
    )
    mask = bs.BlockMask(keep, grid)
    softcap = draw.choice((None, None, 0.5, 30.0))
    sinks = torch.randn(Hq) if draw.random() < 0.3 else None
    scale = draw.choice((D**-0.5, 0.1, 1.0))
    about = (
        f"seed {seed}: B={B} Hq={Hq} Hkv={Hkv} M={M} N={N} D={D} Dv={Dv} {dtype} causal={causal} window={window} "
        f"blocks {q_block} x {k_block} mask heads {heads} {type(permutation).__name__} softcap={softcap} "
        f"sinks={sinks is not None} strides {q.stride()} {k.stride()} {v.stride()}"
    )
    kept = cpu_attention.Kept(mask.keep, q_block, k_block)
    return Case(q, k, v, kept, mask.grid.positions, mask, permutation, LogitChange(softcap, sinks), scale, about)


def _permutation(draw: random.Random, q: Tensor, k: Tensor, q_block: int, causal: bool) -> bs.Permutation:
    (B, Hq, M, _), (_, Hkv, N, _) = q.shape, k.shape
    kind = draw.randrange(5)
    heads = draw.choice((Hkv, Hq))
    k_index = torch.rand(B, heads, 1, N).argsort(-1).int() if kind in (1, 2) else None
    q_index = torch.rand(B, Hq, M).argsort(-1).int() if kind == 2 else None
    if kind < 3 or q_block > N:
        return bs.GlobalPermutation(k_index=k_index, q_index=q_index)
    group = q_block * draw.choice((1, 2, 3))
    offset = N - M if causal else 0
    groups = (offset + M - 1) // group - offset // group + 1
    maps = torch.rand(B, heads, groups, N).argsort(-1).int()
    maps[torch.rand(maps.shape) < 0.1] = -1  # empty slots, that is keys left out
    return bs.Permutation(k_index=maps, group=group)


def check(c: Case) -> None:
    """Raise AssertionError unless the kernel computes what the mask means, the same with every number of threads."""
    pairs = pairs_of(c.permutation, c.mask, c.q, c.k)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(
            cpu_attention.cpu_attention(c.q, c.k, c.v, c.kept, c.positions, scale=c.scale, change=c.change)
        )
    (out, lse), (again, lse_again) = results
    same = torch.equal(out, again) and torch.equal(lse, lse_again)
    assert same, f"threads change bits: {c.about}"
    check_output(c, out, lse, pairs, c.change)


def check_output(c: Case, out: Tensor, lse: Tensor, pairs: Tensor, change: LogitChange) -> None:
    q, k, v = (x.double() for x in (c.q, c.k, c.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * c.scale
    if change.softcap is not None:
        logits = (logits / change.softcap).tanh() * change.softcap
    logits = logits.masked_fill(~pairs, -float("inf"))
    want_lse = logits.logsumexp(-1)
    if change.sinks is not None:
        want_lse = torch.logaddexp(want_lse, change.sinks.double().view(-1, 1).expand_as(want_lse))
    weights = (logits - want_lse.unsqueeze(-1)).exp().where(pairs, 0.0)
    want = weights @ v
    # An error of `e` in a logit is one of `e` in a weight. bf16 and the output are rounded to their own precision.
    size = (weights @ v.abs()).clamp_min(1e-30)
    terms = (q.abs() @ k.abs().mT * c.scale).where(pairs, 0.0).amax(-1, keepdim=True)
    single, own = 2**-24, torch.finfo(c.q.dtype).eps
    allowed = size * (single * (6 * (q.shape[-1] ** 0.5 + 4) * terms + 64 + k.shape[2] ** 0.5)) + 1.1 * own * size
    error = (out.double() - want).abs()
    tiny = torch.finfo(c.q.dtype).smallest_normal
    assert bool((error <= allowed + tiny).all()), (
        f"off by {float((error / allowed).max()):.3g} of the allowed: {c.about}"
    )
    empty = ~pairs.any(-1)
    assert bool((out[empty] == 0).all()), f"a query without keys is not 0: {c.about}"
    assert torch.equal(lse.isinf(), want_lse.isinf()), f"lse: {c.about}"
    off = (lse.double() - want_lse).abs().where(want_lse.isfinite(), 0.0)
    most = single * (8 * (q.shape[-1] ** 0.5 + 4) * terms.squeeze(-1) + 64 + k.shape[2] ** 0.5)
    assert bool((off <= most).all()), (
        f"lse off by {float(off.max()):.3g}, allowed {float(most.max()):.3g}: {c.about}"
    )


def check_stops(c: Case, seed: int) -> tuple[int, int]:
    """The same of a row that stops early; how many rows there are, and how many stop elsewhere than the reference's."""
    draw = random.Random(-seed)
    grid = c.mask.grid
    if grid.window is not None:
        return 0, 0
    keep = c.mask.per_query_head()
    rank = torch.rand(keep.shape).argsort(-1).int() - draw.choice((0, 1))
    tau = torch.full((c.q.shape[1],), draw.choice((0.0, 1e-3, 0.1, 0.5)))
    lists = RankedLists(*visiting_order(keep, rank, tau), c.kept.q_block, c.kept.k_block)
    rule = StopRule(tau, draw.choice((1, 1, 2)), draw.random() < 0.6, draw.random() < 0.3)
    torch.set_num_threads(draw.choice((1, 2)))
    out, lse, blocks = cpu_attention.cpu_gather_attention(c.q, c.k, c.v, lists, c.positions, rule, scale=c.scale)
    torch.set_num_threads(1)
    theirs = gather_attention_reference(c.q, c.k, c.v, lists, c.positions, rule, scale=c.scale)[2]
    seen = torch.arange(keep.shape[-1]) < blocks.unsqueeze(-1)
    visited = bs.BlockMask(torch.zeros_like(keep).scatter_(-1, lists.index.long(), seen), grid)
    check_output(c, out, lse, pairs_of(c.permutation, visited, c.q, c.k), LogitChange())
    return blocks.numel(), int((blocks != theirs).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--flags", default="", help="more flags of the compiler")
    parser.add_argument("--own-threads", action="store_true", help="threads of the kernel's own, not OpenMP's")
    a = parser.parse_args()
    patches: list[Any] = []
    if a.flags:
        path = Path(tempfile.mkdtemp()) / "kernel.so"
        command = [*compiled._command(), *a.flags.split(), str(cpu_attention.SOURCE), "-o", str(path)]
        compiled._compile(command, path.parent)
        loaded = compiled.Loaded(ctypes.PyDLL(str(path)), path, None)
        patches.append(mock.patch.object(cpu_attention, "cpu_kernel", return_value=loaded))
    if a.own_threads:
        patches.append(mock.patch.object(cpu_calls, "_PROCESS", 0))
    for patch in patches:
        patch.start()
    print(cpu_attention.cpu_kernel().path, cpu_attention.cpu_products())
    dtypes, rows, elsewhere = Counter[str](), 0, 0
    for seed in range(a.first, a.first + a.cases):
        c = case(seed)
        check(c)
        there, other = check_stops(c, seed)
        rows, elsewhere = rows + there, elsewhere + other
        dtypes[str(c.q.dtype)] += 1
        if seed % 500 == 499:
            print(seed + 1, flush=True)
    print(f"{a.cases} cases right, {dict(dtypes)}; of {rows} rows that may stop early {elsewhere} stop elsewhere")
    assert elsewhere <= rows / 1000


if __name__ == "__main__":
    with torch.no_grad():
        main()

"""Choosing blocks on a GPU, each kernel against its plain torch twin: `python -m benchmarks.selection`.

Refuses to time what differs from its twin by a single block.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import blocksparse as bs
from blocksparse.kernels.masks.blocks import block_lists
from blocksparse.kernels.score.block_softmax import block_softmax
from blocksparse.kernels.select.top_cdf import top_cdf, top_cdf_reference
from blocksparse.kernels.select.top_k import top_k


def setting(tokens: int, heads: int, *, sorted_keys: bool = False) -> tuple[bs.Grid, Tensor]:
    """A causal grid of 128 x 128 blocks, and logits that look like pooled ones."""
    q = torch.zeros(1, heads, tokens, 1, device="cuda")
    k = torch.zeros(1, max(1, heads // 4), tokens, 1, device="cuda")
    order = None
    if sorted_keys:
        order = torch.rand(1, k.shape[1], tokens // 256, 256, device="cuda").argsort(-1)
        order = (order + torch.arange(0, tokens, 256, device="cuda")[:, None]).flatten(2).unsqueeze(2).int()
    grid = bs.Grid.of(q, k, bs.GlobalPermutation(order), bs.AttentionSpec(scale=1.0), q_block=128, k_block=128)
    return grid, 2.0 * torch.randn(1, heads, grid.rows, grid.cols, device="cuda")


def share(value: float, logits: Tensor) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float64, device=logits.device)


def check(tokens: int, heads: int) -> None:
    """Every kernel against its twin.

    Raises:
        RuntimeError: they differ.
    """

    def same(name: str, got: Tensor, want: Tensor) -> None:
        if not torch.equal(got, want):
            raise RuntimeError(f"{name}, {tokens} tokens: {int((got != want).sum())} of {got.numel()} differ")

    for sorted_keys in (False, True):
        grid, logits = setting(tokens, heads, sorted_keys=sorted_keys)
        segment = 256 if sorted_keys else None
        mass, own = block_softmax(logits.clone(), grid, scale=0.7, segment=segment)
        want, want_own = block_softmax.plain(logits, grid, scale=0.7, segment=segment)
        torch.testing.assert_close(mass, want, rtol=1e-5, atol=1e-9)
        if own is not None and want_own is not None:
            same("own segment", own, want_own)
        coarse = (mass * 4096).round()  # many ties
        for values in (mass, mass**3, coarse, mass * 1e-35):
            for target in (0.5, 0.9, 0.99, 1.0):
                for crossing in (True, False):
                    call = values, own, share(target, values), grid
                    got, want = (f(*call, crossing=crossing) for f in (top_cdf, top_cdf_reference))
                    same(f"top_cdf {target} {crossing}", got, want)
            for number, tenth in ((8, None), (None, share(0.1, values))):
                for first in (True, False):
                    got, want = (
                        f(values, own, number, tenth, grid, forced_first=first, of_all_keys=False)
                        for f in (top_k, top_k.plain)
                    )
                    same(f"top_k {number} {first}", got, want)
            for part, twin in zip(block_lists(got, grid), block_lists.plain(got, grid), strict=True):
                same("block_lists", part, twin)
    print(f"{tokens} tokens, {heads} heads: kernels and twins agree", flush=True)


def time_gpu(call: Callable[[], object]) -> float:
    """Median milliseconds on the device."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=40, return_mode="median"))


def measure(tokens: int, heads: int) -> None:
    """Prints milliseconds of every step."""
    grid, logits = setting(tokens, heads, sorted_keys=True)
    mass, own = block_softmax(logits.clone(), grid, segment=256)
    plain = block_softmax(logits.clone(), grid)[0]
    keep = top_cdf(mass, own, share(0.9, mass), grid, crossing=True)
    tenth = share(0.1, mass)
    steps: dict[str, Callable[[], object]] = {
        "softmax": lambda: block_softmax(logits, grid),
        "softmax, own segment out": lambda: block_softmax(logits, grid, segment=256),
        "TopCdf .9": lambda: top_cdf(plain, None, share(0.9, mass), grid, crossing=True),
        "TopCdf .9, forced": lambda: top_cdf(mass, own, share(0.9, mass), grid, crossing=True),
        "TopCdf .98, dropped": lambda: top_cdf(plain, None, share(0.98, mass), grid, crossing=False),
        "TopK 10 %": lambda: top_k(mass, own, None, tenth, grid, forced_first=True, of_all_keys=False),
        "lists": lambda: block_lists(keep, grid),
    }
    figures = "  ".join(f"{name} {time_gpu(call):.4f}" for name, call in steps.items())
    kept = float(keep.sum()) / float(grid.reachable.expand(keep.shape).sum())
    print(f"{tokens} tokens, {heads} heads, {kept:.3f} of reachable blocks kept: {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["8192x32", "32768x32", "131072x32", "1048576x4"])
    arguments = parser.parse_args()
    check(8192, 32)
    check(32768, 32)
    for case in arguments.cases:
        tokens, heads = (int(n) for n in case.split("x"))
        measure(tokens, heads)


if __name__ == "__main__":
    with torch.no_grad():
        main()

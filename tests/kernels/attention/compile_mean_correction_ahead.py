"""Compile the kernels of the mean correction for targets that are not here; prints one line per target and kernel.

Run as a script, in a process of its own: the test suite interprets kernels, and this compiles them.
"""

from __future__ import annotations

import sys

import torch

import blocksparse as bs
from blocksparse.kernels.attention.mean_correction import add_mean_correction
from blocksparse.kernels.common.tiles import portable
from blocksparse.kernels.masks.arguments import KeptBlocks
from blocksparse.testing import make_qkv
from tests.kernels.ahead import HARDWARE, MATRIX_INSTRUCTION, SHARED, TARGETS, TEXT, for_target
from tests.kernels.launched import gathered


def main() -> int:
    failed = 0
    for name, target in TARGETS.items():
        for head_dim, dtype, causal in for_target(
            name, (128, torch.bfloat16, False), (80, torch.float16, True), (64, torch.float32, True)
        ):
            q, k, v = make_qkv(N=256, Hq=2, Hkv=1, D=head_dim, dtype=dtype)
            spec, order = bs.AttentionSpec(scale=1.0, causal=causal), bs.GlobalPermutation()
            grid = bs.Grid.of(q, k, order, spec, q_block=64, k_block=64)
            keep = torch.zeros(1, 2, grid.rows, grid.cols, dtype=torch.bool)
            tiles = portable(64, 64, head_dim, q.element_size(), HARDWARE[name])
            with gathered(name) as found:
                add_mean_correction(
                    q, k, v, torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32),
                    KeptBlocks(keep, grid), scale=1.0, softcap=30.0 if causal else None, tiles=tiles,
                )  # fmt: skip
            for variant in found.values():
                kernel = variant.compiled(target)
                products = kernel.asm[TEXT[target.backend]].count(MATRIX_INSTRUCTION[name])
                multiplies = variant.name.endswith("._add") and dtype != torch.float32
                failed += (multiplies and not products) or kernel.metadata.shared > SHARED[name]
                print(
                    f"{name} {variant.name} {dtype} D={head_dim}: {products} products, {kernel.metadata.shared} B shared"
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

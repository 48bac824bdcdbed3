"""Error of 8-bit attention on a real model, layer by layer: `python -m benchmarks.eight_bit_error`.

On the q, k, v of a dense pass of SmolLM2-135M: relative L1 distance of `Int8Executor`'s output from dense causal
attention in float64 of the same bf16 inputs. Needs a Hopper GPU; `--save FILE` stores what it reads on another
machine, and `--qkv FILE` takes that. Makes the table of docs/evidence/eight-bit-rounding.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

import blocksparse as bs
from benchmarks.quality import QKV, TEXT_START, first_tokens, layers_of, smollm2
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.model import load

EXECUTORS: dict[str, bs.Executor[bs.GlobalPermutation, bs.BlockMask]] = {
    "bf16 (`TritonExecutor`)": bs.TritonExecutor(),
    "int8 QK, bf16 PV": bs.Int8Executor(fp8_pv=False),
    "int8 QK, bf16 PV, keys not smoothed": bs.Int8Executor(fp8_pv=False, smooth_k=False),
    "int8 QK, fp8 PV": bs.Int8Executor(),
    "int8 QK, fp8 PV, keys not smoothed": bs.Int8Executor(smooth_k=False),
}


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64, head by head."""
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
    heads, group = [], q.shape[1] // k.shape[1]
    for h in range(q.shape[1]):
        scores = q[:, h].double() @ k[:, h // group].double().mT * q.shape[-1] ** -0.5
        heads.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, h // group].double())
    return torch.stack(heads, 1)


def errors(
    executor: bs.Executor[bs.GlobalPermutation, bs.BlockMask], layers: dict[int, QKV], block: int
) -> Tensor:
    """Relative L1 by layer and head, and of whole layers in the last column, `[layers, Hq + 1]`."""
    pipeline = bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(block), bs.Everything(), executor)
    found = []
    for q, k, v in layers.values():
        want = dense(q, k, v)
        off = (pipeline(q, k, v).double() - want).abs().sum((0, 2, 3))
        size = want.abs().sum((0, 2, 3))
        found.append(torch.cat((off / size, (off.sum() / size.sum())[None])).cpu())
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--every", type=int, default=2, help="take one of so many layers")
    parser.add_argument("--qkv", type=Path, help="a file that --save made")
    parser.add_argument("--save", type=Path, help="store the layers' q, k, v, and do nothing else")
    options = parser.parse_args()

    if options.qkv is not None:
        layers: dict[int, QKV] = torch.load(options.qkv)
    else:
        model = load(smollm2(), device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        content = options.text.read_text(encoding="utf-8")[TEXT_START:]
        every = layers_of(model, first_tokens(model, content, options.tokens))
        layers = {i: qkv for i, qkv in every.items() if i % options.every == 0}
    if options.save is not None:
        torch.save({i: tuple(x.bfloat16().cpu().clone() for x in qkv) for i, qkv in layers.items()}, options.save)
        return
    layers = {i: (q.cuda(), k.cuda(), v.cuda()) for i, (q, k, v) in layers.items()}
    tokens = next(iter(layers.values()))[0].shape[2]
    print(f"SmolLM2-135M, {tokens} tokens, {len(layers)} layers; relative L1\n")
    print("| | blocks | mean over layers | worst layer | worst head |\n|---|---|---|---|---|")
    for block in options.block:
        for name, executor in EXECUTORS.items():
            found = errors(executor, layers, block)
            layer = found[:, -1]
            mean = statistics.fmean(layer.tolist())
            print(f"| {name} | {block} | {mean:.4f} | {layer.max():.4f} | {found[:, :-1].max():.4f} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

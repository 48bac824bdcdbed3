"""Time to first token of a whole model, dense and sparse: `python -m benchmarks.model`.

A model of Llama-3.1-8B's shape with random bf16 weights reads a prompt of random tokens in one go, with a cache,
for the logits of the last token alone. One table row per length. With `--padded` it reads prompts of these lengths
as one batch, padded on the left. Needs a GPU and transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import blocksparse as bs
from blocksparse.hosts.transformers import DensityRecorder, attach
from blocksparse.layers.head_groups import AnyPipeline

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": ROPE,
}
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Backends of `scaled_dot_product_attention` that a dense prefill may take."""


def make_model(layers: int, device: str = "cuda") -> Any:
    """The model, ready to read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPE | {"num_hidden_layers": layers}, dtype="bfloat16")
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def sparse(density: float, selector: bs.Selector[bs.BlockScores, bs.BlockMask] | None = None) -> AnyPipeline:
    """Pooled means and a fixed share of the blocks; or another choice."""
    choice = selector or bs.TopK(share=density)
    return bs.Pipeline(bs.Identity(), bs.MeanPoolScorer(), choice, bs.TritonExecutor())


@contextmanager
def without_attention(model: Any) -> Iterator[None]:
    """Queries come back as they are: what is left is the rest of the model, the bound of any speed-up."""
    from transformers import AttentionInterface

    def nothing(_: object, query: Tensor, *__: object, **___: object) -> tuple[Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register("nothing", nothing)
    try:
        model.set_attn_implementation("nothing")
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("nothing")


def read(model: Any, prompt: Tensor, **more: Tensor) -> Tensor:
    """Logits of the token after the prompt `[1, N]`, or after each of a batch."""
    logits: Tensor = model(prompt, use_cache=True, logits_to_keep=1, **more).logits
    return logits


def milliseconds(reading: Callable[[], object], repeats: int) -> float:
    """Median time of reading a prompt, after reading it once: kernels are compiled for a length they meet."""
    reading()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        reading()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def check(model: Any, density: float) -> None:
    """Keeping every block gives the logits of dense attention, up to what bf16 may do in so many layers.

    How much that is, two dense backends tell: random weights carry a rounding through all layers.

    Raises:
        RuntimeError: it does not.
    """
    prompt = torch.randint(SHAPE["vocab_size"], (1, 3000), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        want = read(model, prompt).float()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        other = read(model, prompt).float()
    with attach(model, sparse(density, bs.Everything()), min_tokens=1):
        got = read(model, prompt).float()
    error, allowed = (float((x - want).norm() / want.norm()) for x in (got, other))
    print(f"relative error of the logits: {error:.1e} attached, {allowed:.1e} between dense backends", flush=True)
    if not error < 1.5 * allowed:
        raise RuntimeError(f"the attached model differs from the dense one: {error:.2e}, allowed {allowed:.2e}")


def measure(model: Any, N: int, density: float, dense: list[str], repeats: int) -> dict[str, Any]:
    """Milliseconds of every way to read a prompt of `N` tokens; inf where a dense backend refuses."""
    prompt = torch.randint(SHAPE["vocab_size"], (1, N), device="cuda")
    timed = partial(milliseconds, partial(read, model, prompt), repeats)
    row: dict[str, Any] = {"N": N}
    for name in dense:
        try:
            with sdpa_kernel(DENSE[name]):
                row[name] = timed()
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            row[name] = float("inf")
    torch.cuda.reset_peak_memory_stats()
    with attach(model, sparse(density)):
        row["sparse"] = timed()
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    with without_attention(model):
        row["no attention"] = timed()
    row["ratio"] = min(row[name] for name in dense) / row["sparse"]
    row["bound"] = min(row[name] for name in dense) / row["no attention"]
    return row


def padded(model: Any, lengths: list[int], density: float, repeats: int) -> dict[str, Any]:
    """Milliseconds to read prompts of these lengths as one batch, padded on the left.

    `sdpa` is what transformers does with such a batch. `one by one` reads the prompts by themselves, without any
    padding: densely by cuDNN, whatever `--dense` names.
    """
    longest, device = max(lengths), model.device
    prompts = torch.randint(SHAPE["vocab_size"], (len(lengths), longest), device=device)
    mask = torch.arange(longest, device=device) >= longest - torch.tensor(lengths, device=device)[:, None]
    more = {"attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    batch = partial(read, model, prompts, **more)

    def one_by_one() -> None:
        for prompt, N in zip(prompts, lengths, strict=True):
            read(model, prompt[None, longest - N :])

    row: dict[str, Any] = {"lengths": lengths, "sdpa": milliseconds(batch, repeats)}
    with sdpa_kernel(DENSE["cudnn"]):
        row["one by one"] = milliseconds(one_by_one, repeats)
    with attach(model, sparse(density)):
        row["sparse"] = milliseconds(batch, repeats)
        row["sparse, one by one"] = milliseconds(one_by_one, repeats)
    recorder = DensityRecorder()
    with attach(model, sparse(density), recorder=recorder):
        batch()
    if recorder.dense_calls():
        raise RuntimeError(f"layers that must be sparse were dense: {recorder.dense_calls()}")
    return row | {"density": float(recorder.density().mean()), "ratio": row["sdpa"] / row["sparse"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--padded", action="store_true", help="these lengths as one padded batch")
    parser.add_argument("--density", type=float, default=0.1, help="share of each row's blocks that are kept")
    parser.add_argument("--dense", nargs="+", choices=tuple(DENSE), default=list(DENSE))
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(arguments.layers)
    check(model, arguments.density)
    if arguments.padded:
        row = padded(model, arguments.lengths, arguments.density, arguments.repeats)
        print(", ".join(f"{name} {x:.2f}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()))
        _write(arguments, [row])
        return
    columns = [*arguments.dense, "sparse", "no attention"]
    print("tokens  " + "  ".join(f"{name:>12}" for name in columns) + "   ratio  bound  peak GiB")
    rows = []
    for N in arguments.lengths:
        rows.append(row := measure(model, N, arguments.density, arguments.dense, arguments.repeats))
        times = "  ".join(f"{row[name]:9.0f} ms" for name in columns)
        print(f"{N:>6}  {times}  {row['ratio']:6.2f}  {row['bound']:5.2f}  {row['peak_gib']:8.1f}", flush=True)
    _write(arguments, rows)


def _write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    shape = SHAPE | {"num_hidden_layers": arguments.layers}
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"shape": shape, "density": arguments.density, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()

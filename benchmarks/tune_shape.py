"""What `tune` costs for a model of some shape, with random weights: `python -m benchmarks.tune_shape`.

The default is Llama-3.1-8B's shape. Random weights say nothing about quality: time and memory are what counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from blocksparse.tools.tune import Budget, TunePrompt, tune


def main() -> int:
    options = _options()
    device, begin = torch.device(options.device), time.perf_counter()
    network = _model(options, device)
    draw = torch.Generator().manual_seed(0)

    def prompt() -> TunePrompt:
        """Random tokens, the last eight of which are the answer."""
        ids = torch.randint(3, options.vocabulary, (1, options.tokens), generator=draw)
        return TunePrompt(ids, ((options.tokens - 8, options.tokens),))

    prompts, held = ([prompt() for _ in range(options.count)] for _ in range(2))
    print(f"the model is there after {time.perf_counter() - begin:.1f} s", flush=True)
    said = [0.0]

    def report(what: Any, *more: Any) -> None:
        if time.perf_counter() - said[0] > 5:
            said[0] = time.perf_counter()
            print(f"{said[0] - begin:6.1f} s", what, *more, flush=True)

    start = time.perf_counter()
    plan = tune(
        network, prompts, held, journal=options.out.with_suffix(".journal"), budget=Budget(), report=report
    )
    found: dict[str, Any] = {
        "seconds": round(time.perf_counter() - start, 1),
        "dense_ms": plan.evidence.dense_ms,
        "plan_ms": plan.evidence.plan.ms,
        "density": plan.evidence.plan.density,
        "layers": [str(part.attention or "dense") for part in plan.layers],
    }
    if device.type == "cuda":
        found |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "gpu": torch.cuda.get_device_name(),
        }
    options.out.write_text(json.dumps(found | {"options": vars(options) | {"out": options.out.name}}, indent=1))
    print(json.dumps(found, indent=1))
    return 0


def _model(options: argparse.Namespace, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.heads * options.head_dim, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.head_dim, intermediate_size=options.inner,
        num_hidden_layers=options.layers, vocab_size=options.vocabulary, max_position_embeddings=131072,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("tune-shape.json"), help="the result; a journal lies beside"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")
    parser.add_argument("--count", type=int, default=2, help="prompts to compare on, and as many to verify on")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--inner", type=int, default=14336, help="size of the layers between attention")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

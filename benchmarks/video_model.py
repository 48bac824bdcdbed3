"""Time of a video model's transformer blocks, dense and sparse: `python -m benchmarks.video_model`.

Blocks of Wan 2.1 14B's shape with random bf16 weights run over the latents of a clip, by default 81 frames at 720p
(75,600 tokens). Beside each forward call stands a call of self-attention alone, on made-up tokens that are alike
where they are near. Nothing is compiled by `torch.compile`. Needs diffusers, and a GPU; a CPU can try it in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attrs import evolve
from diffusers import WanTransformer3DModel, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_wan
from torch import Tensor
from torch.nn.functional import interpolate

import blocksparse as bs
from benchmarks.inputs import QKV
from benchmarks.timing import relative_l1, some_rows
from blocksparse.hosts.diffusers import DensityRecorder, attach
from blocksparse.layers.head_groups import AnyPipeline
from blocksparse.order.grid_orders import GridOrder
from blocksparse.tools.bench import repeated

SHAPE: dict[str, Any] = {"attention_head_dim": 128, "ffn_dim": 13_824, "text_dim": 4096, "in_channels": 16}
TEXT_TOKENS = 512
BACKENDS = {"cuda": ("_native_cudnn", "_native_flash"), "cpu": ("native", "_native_math")}
"""diffusers' names of the dense backend that is timed, and of one that tells how far two of them may differ."""
EXACT = bs.AutoExecutor(dense_below=0)


def make_model(layers: int, heads: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, with fp32 where diffusers keeps it.

    Random weights attend almost evenly and have gates near 0, which would hide wrong attention. Here queries are
    larger, and the gates of self-attention near 1.
    """
    with device:
        model = WanTransformer3DModel(**SHAPE, num_attention_heads=heads, num_layers=layers).eval()
    for block in model.blocks:
        block.attn1.norm_q.weight.fill_(3.0)
        block.scale_shift_table[:, 2] = 1.0
    for name, weight in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            weight.data = weight.data.to(dtype)
    return model


def video_like(grid: tuple[int, int, int], heads: int, device: torch.device, dtype: torch.dtype) -> QKV:
    """`q`, `k`, `v` `[1, heads, T * H * W, D]`: projections of features that change slowly from place to place."""
    coarse = torch.randn(1, 32, *(-(-size // 6) + 1 for size in grid), device=device)
    features = interpolate(coarse, grid, mode="trilinear", align_corners=True)[0].flatten(1).T
    features = features + 0.3 * torch.randn_like(features)
    of_k, own, of_v = torch.randn(3, heads, 32, SHAPE["attention_head_dim"], device=device) / 32**0.5
    # Queries look for keys like themselves.
    q, k, v = (features.to(dtype) @ x.to(dtype) for x in (2 * of_k + own, of_k, of_v))
    return q[None], k[None], v[None]


def methods(order: GridOrder, shares: list[float], device: torch.device) -> dict[str, AnyPipeline]:
    """Pipelines that keep these shares of each row's blocks."""
    made: dict[str, AnyPipeline] = {}
    for share in shares:
        made[f"sparge {share}"] = bs.sparge(share=share, order=order, executor=EXACT)
        if device.type == "cuda":
            made[f"sparge {share}, 8 bits"] = bs.sparge(share=share, order=order, executor=bs.Int8Executor())
        made[f"pooled means {share}"] = bs.Pipeline(order, bs.MeanPoolScorer(), bs.TopK(share=share), EXACT)
    return made


def without_attention() -> AbstractContextManager[Any]:
    """Queries of self-attention come back as they are: what is left is the bound of any speed-up."""

    def nothing(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out: Tensor = query if query.shape == key.shape else dispatch_attention_fn(query, key, value, **options)
        return out

    return patch.object(transformer_wan, "dispatch_attention_fn", nothing)


def check(model: Any, given: dict[str, Tensor], everything: AnyPipeline, other: str) -> dict[str, float]:
    """Keeping every block gives the output of dense attention, up to what another dense backend differs by.

    Raises:
        RuntimeError: it does not, or even a tenth of the blocks gives nearly that output.
    """
    want = model(**given).sample.float()

    def error(context: AbstractContextManager[Any]) -> float:
        with context:
            return float((model(**given).sample.float() - want).norm() / want.norm())

    tenth: AnyPipeline = evolve(everything, selector=bs.TopK(share=0.1))
    errors = {
        "attached": error(attach(model, everything, min_tokens=1)),
        "between dense backends": error(attention_backend(other)),
        "with a tenth of the blocks": error(attach(model, tenth, min_tokens=1)),
    }
    print("relative error: " + ", ".join(f"{x:.1e} {name}" for name, x in errors.items()), flush=True)
    allowed = 1.5 * errors["between dense backends"] + 1e-6
    if not errors["attached"] < allowed < errors["with a tenth of the blocks"] / 4:
        raise RuntimeError(f"the attached model is not shown to be the dense one: {errors}, allowed {allowed:.1e}")
    return errors


def milliseconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of the call, after one that compiles kernels."""
    call()
    return statistics.median(repeated(call, repeats, device))


def measure(model: Any, given: dict[str, Tensor], pipeline: AnyPipeline, repeats: int) -> dict[str, float]:
    """Milliseconds and density of the forward call with a pipeline.

    Raises:
        RuntimeError: a layer attended densely.
    """
    with attach(model, pipeline, min_tokens=1, recorder=(recorder := DensityRecorder())):
        model(**given)
    if recorder.dense_calls():
        raise RuntimeError(f"layers attended densely: {recorder.dense_calls()}")
    with attach(model, pipeline, min_tokens=1):
        ms = milliseconds(partial(model, **given), repeats, given["hidden_states"].device)
    return {"forward_ms": ms, "forward_density": float(recorder.density().mean())}


def alone(pipeline: AnyPipeline, qkv: QKV, rows: Tensor, want: Tensor, repeats: int) -> dict[str, float]:
    """Milliseconds and density of attention alone, and the relative L1 distance of some rows from dense ones."""
    trace = pipeline.trace(*qkv, causal=False)
    density, out = float(trace.density().mean()), trace.output.out[:, :, rows]
    del trace  # which holds everything, the orders of q and k too
    ms = milliseconds(partial(pipeline, *qkv, causal=False), repeats, rows.device)
    return {"alone_ms": ms, "alone_density": density, "error": float(relative_l1(out, want).mean())}


def table(rows: list[dict[str, Any]]) -> str:
    """A line per method; ratios are of the first row's times, the dense ones."""
    lines = [f"{'method':<22}    forward  ratio  density       alone  ratio  density   error"]
    for row in rows:
        line = f"{row['method']:<22}"
        for part in ("forward", "alone"):
            if ms := row.get(f"{part}_ms"):
                line += f"{ms:8.1f} ms {rows[0][f'{part}_ms'] / ms:6.2f}  {row[f'{part}_density']:7.3f}  "
        lines.append(line + (f"{row['error']:6.4f}" if "error" in row else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latent", type=int, nargs=3, default=[21, 90, 160], metavar=("T", "H", "W"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3], help="of a row's blocks, that are kept")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (T, H, W), (dense, other) = options.latent, BACKENDS[device.type]
    grid = T, H // 2, W // 2
    if prod(grid) == TEXT_TOKENS:  # by their number, self-attention is told from that to the text
        parser.error(f"take another --latent: it has as many tokens as the text, {TEXT_TOKENS}")
    model = make_model(options.layers, options.heads, device, dtype)
    given = {
        "hidden_states": torch.randn(1, SHAPE["in_channels"], T, H, W, device=device, dtype=dtype),
        "timestep": torch.tensor([900], device=device),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, SHAPE["text_dim"], device=device, dtype=dtype),
    }
    print(f"{prod(grid)} tokens {grid}, {options.layers} layers, {options.heads} heads", flush=True)
    everything = bs.Pipeline(bs.HilbertOrder(), bs.MeanPoolScorer(128, k_block=64), bs.Everything(), EXACT)
    with attention_backend(dense):
        errors = check(model, given, everything, other)
        whole, repeats = partial(model, **given), options.repeats
        first: dict[str, Any] = {"method": f"dense ({dense})", "forward_density": 1.0, "alone_density": 1.0}
        rows = [first | {"forward_ms": milliseconds(whole, repeats, device)}]
        for name, pipeline in methods(bs.HilbertOrder(), options.shares, device).items():
            rows.append({"method": name} | measure(model, given, pipeline, repeats))
        with without_attention():
            bound = {"method": "no self-attention", "forward_density": 0.0}
            bound["forward_ms"] = milliseconds(whole, repeats, device)
        qkv = video_like(grid, options.heads, device, dtype)
        attend = partial(dispatch_attention_fn, *(x.transpose(1, 2) for x in qkv))
        rows[0]["alone_ms"] = milliseconds(attend, repeats, device)
        some = some_rows(prod(grid), device)
        want = attend()[:, some].transpose(1, 2)
        order = bs.GivenOrder(grid, bs.HilbertOrder(grid).cells(device))  # computed once, as `attach` does
        for row, pipeline in zip(rows[1:], methods(order, options.shares, device).values(), strict=True):
            row |= alone(pipeline, qkv, some, want, repeats)
    rows.append(bound)
    print(table(rows))
    if options.json:
        chosen = {name: x for name, x in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": chosen, "check": errors, "rows": rows}, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()

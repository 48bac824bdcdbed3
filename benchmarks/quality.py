"""What each preset costs a real model in quality: `python -m benchmarks.quality`.

Layer by layer on the q, k, v of a dense pass: density, covered mass, relative L1 and MSE of the output. Then the
model itself: perplexity, and facts that it must find in the text. Needs SmolLM2-135M (see `make demo`) or
another folder with a model. On a CPU choose few tokens, with a GPU any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import blocksparse as bs
from benchmarks.oracle import TrueMassScorer
from benchmarks.quality_settings import SETTINGS, Setting
from blocksparse.hosts.transformers import attach
from blocksparse.tools.demo import TEXT
from blocksparse.tools.demo.measure import Prompt, build, perplexity
from blocksparse.tools.demo.model import Model, convert_smollm2, load

QKV = tuple[Tensor, Tensor, Tensor]
AnyPipeline = bs.Pipeline[Any, Any, Any]
DEPTHS = (0.05, 0.275, 0.5, 0.725, 0.95)
NEEDLES_PER_DEPTH = 2
TEXT_START = 100_000  # character of the text at which a window begins
YARN_FACTOR = 4.0
ALWAYS_SPARSE = bs.AutoExecutor(dense_below=0)  # also where a GPU would be faster without


@frozen
class Layers:
    """What one pipeline does to the attention of each layer; one entry per layer."""

    density: list[float]
    covered_mass: list[float]
    l1: list[float]
    mse: list[float]


@frozen
class Result:
    """One preset with one setting on one text; None where it was not measured."""

    preset: str
    setting: str
    text: str
    tokens: int
    block: int
    layers: Layers
    perplexity: float | None
    found: int | None  # of the needles
    needles: int
    seconds: float


@torch.inference_mode()
def layers_of(model: Model, ids: Tensor) -> dict[int, QKV]:
    """q, k, v of every layer, as attention gets them, from one dense pass."""
    from transformers import AttentionInterface, AttentionMaskInterface

    network, kept = model.network, dict[int, QKV]()
    before = network.config._attn_implementation
    attention = AttentionInterface()[before]

    def keeping(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        kept[module.layer_idx] = (q, k, v)
        return attention(module, q, k, v, *rest, **options)

    AttentionInterface.register("quality-keeps", keeping)
    AttentionMaskInterface.register("quality-keeps", AttentionMaskInterface()[before])
    network.set_attn_implementation("quality-keeps")
    try:
        network.model(ids)
    finally:
        network.set_attn_implementation(before)
    return kept


def smollm2() -> Path:
    """The folder of SmolLM2-135M, converted unless it is there."""
    folder = Path("demo-output") / "SmolLM2-135M-Instruct"
    folder.parent.mkdir(exist_ok=True)
    convert_smollm2(folder)
    return folder


def first_tokens(model: Model, content: str, tokens: int) -> Tensor:
    """`[1, tokens]`, the beginning of a text."""
    window = model.tokenizer.encode(content[: 10 * tokens], add_special_tokens=False)[:tokens]
    return torch.tensor([window], device=model.device)


def dense_outputs(layers: dict[int, QKV]) -> dict[int, Tensor]:
    """Dense causal attention of each layer, in fp32."""
    return {
        i: scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
        for i, (q, k, v) in layers.items()
    }


def layer_by_layer(pipeline: AnyPipeline, layers: dict[int, QKV], dense: dict[int, Tensor]) -> Layers:
    """Density, covered mass, relative L1 and MSE of each layer."""
    rows = []
    for layer, (q, k, v) in layers.items():
        trace = pipeline.trace(q, k, v)
        difference = trace.output.out.float() - dense[layer]
        rows.append(
            torch.stack(
                [
                    trace.density().mean().double(),
                    trace.covered_mass().mean().double(),
                    difference.abs().sum().double() / dense[layer].abs().sum().double(),
                    difference.square().mean().double(),
                ]
            )
        )
    return Layers(*torch.stack(rows, dim=1).tolist())


@torch.inference_mode()
def read(model: Model, pipeline: AnyPipeline | None, ids: Tensor, counted: Tensor) -> float:
    """Perplexity of the tokens `counted`, read with `pipeline`; None is dense."""
    with _attached(model, pipeline):
        hidden = model.network.model(ids).last_hidden_state
    return perplexity(model.network, hidden, ids, counted)


@torch.inference_mode()
def find(model: Model, pipeline: AnyPipeline | None, prompts: list[Prompt], batch: int) -> int:
    """How many answers the model would give greedily, token by token, after reading with `pipeline`."""
    found = 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        answers = [model.tokenizer.encode(" " + p.answer, add_special_tokens=False) for p in part]
        with _attached(model, pipeline):
            first = model.network.model(torch.cat([p.ids for p in part]).to(model.device), use_cache=True)
            given = torch.tensor(answers, device=model.device)
            # Greedy decoding gives the answer if every token of it is the likeliest after those before it.
            rest = model.network.model(given[:, :-1], past_key_values=first.past_key_values)
        hidden = torch.cat((first.last_hidden_state[:, -1:], rest.last_hidden_state), dim=1)
        found += int((model.network.lm_head(hidden).argmax(-1) == given).all(-1).sum())
    return found


@contextmanager
def _attached(model: Model, pipeline: AnyPipeline | None) -> Iterator[None]:
    if pipeline is None:
        yield
    else:
        with attach(model.network, pipeline):
            yield


def with_yarn(folder: Path, device: torch.device) -> Model:
    """The same weights with four times the context, by YaRN, untuned."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    trained = config.max_position_embeddings
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": trained,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    config.max_position_embeddings = int(trained * YARN_FACTOR)
    network = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Model(network.to(device).eval(), tokenizer, f"{folder.name} with YaRN", device)


def measure(
    model: Model, text: Path, tokens: int, blocks: list[int], options: argparse.Namespace
) -> Iterator[Result]:
    """Every preset and setting on one window of a text; dense and the oracle first."""
    content = text.read_text(encoding="utf-8")[TEXT_START:]
    ids = first_tokens(model, content, tokens)
    counted = torch.ones(tokens, dtype=torch.bool, device=model.device)
    # The model was trained on 8192 tokens and misses at the very end of them even when dense.
    needle_tokens = min(tokens, 7680) if tokens <= 8192 else tokens
    depths = [depth for depth in DEPTHS for _ in range(NEEDLES_PER_DEPTH)] if options.needles else []
    prompts = [
        build(model.tokenizer, content, tokens=needle_tokens, depth=depth, seed=seed)
        for seed, depth in enumerate(depths)
    ]
    batch = max(1, min(len(prompts), 81920 // needle_tokens))
    layers = layers_of(model, ids)
    chosen = {i: qkv for i, qkv in layers.items() if i % (4 if tokens > 8192 else 1) == 0}
    dense = dense_outputs(chosen)
    yield Result(
        "dense", "", text.stem, tokens, 0, Layers([1.0], [1.0], [0.0], [0.0]),
        read(model, None, ids, counted), find(model, None, prompts, batch), len(prompts), 0.0,
    )  # fmt: skip
    for block in blocks:
        for mass in (0.8, 0.9, 0.95, 0.99):
            oracle = bs.Pipeline(bs.Identity(), TrueMassScorer(block), bs.TopCdf(mass), ALWAYS_SPARSE)
            figures = layer_by_layer(oracle, chosen, dense)
            yield Result("oracle", f"{mass}", text.stem, tokens, block, figures, None, None, 0, 0.0)
        for setting in SETTINGS:
            if options.presets and setting.preset not in options.presets:
                continue
            yield one(model, setting, text.stem, block, ids, counted, prompts, batch, chosen, dense)


def one(
    model: Model,
    setting: Setting,
    text: str,
    block: int,
    ids: Tensor,
    counted: Tensor,
    prompts: list[Prompt],
    batch: int,
    layers: dict[int, QKV],
    dense: dict[int, Tensor],
) -> Result:
    """One preset with one setting."""
    start, pipeline = time.perf_counter(), setting.pipeline(block=block)
    if isinstance(pipeline.executor, bs.AutoExecutor):
        pipeline = evolve(pipeline, executor=ALWAYS_SPARSE)
    figures = layer_by_layer(pipeline, layers, dense)
    return Result(
        setting.preset,
        setting.label,
        text,
        ids.shape[1],
        block,
        figures,
        read(model, pipeline, ids, counted),
        find(model, pipeline, prompts, batch),
        len(prompts),
        time.perf_counter() - start,
    )


def report(r: Result) -> None:
    """One line per result."""
    mean = statistics.fmean
    text = (
        f"{r.text[:10]:10} {r.tokens:6} b{r.block:<4} {r.preset:14} {r.setting:22} density "
        f"{mean(r.layers.density):.3f} mass {mean(r.layers.covered_mass):.3f} L1 {mean(r.layers.l1):.4f} "
        f"MSE {mean(r.layers.mse):.1e}"
    )
    if r.perplexity is not None:
        text += f" ppl {r.perplexity:.2f} found {r.found}/{r.needles}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    jargon = Path(__file__).parents[1] / "examples" / "data" / "jargon.txt"
    parser.add_argument("--model", type=Path, help="a folder with a transformers model; SmolLM2 if not given")
    parser.add_argument("--text", type=Path, nargs="+", default=[TEXT, jargon])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--yarn-tokens", type=int, nargs="*", default=[32768])
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--presets", nargs="*", help="only these")
    parser.add_argument("--no-needles", dest="needles", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("quality.json"))
    options = parser.parse_args()

    folder = options.model or smollm2()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: list[Result] = []
    for model, lengths in (
        (load(folder, device=device), options.tokens),
        *(((with_yarn(folder, device), options.yarn_tokens),) if options.yarn_tokens else ()),
    ):
        for text in options.text:
            for tokens in lengths:
                for result in measure(model, text, tokens, options.blocks, options):
                    report(result)
                    results.append(result)
                    options.out.write_text(json.dumps([asdict(r) for r in results]), encoding="utf-8")


if __name__ == "__main__":
    main()

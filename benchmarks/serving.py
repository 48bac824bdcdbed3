"""vLLM on a GPU, stock and with the plugin in turn: `python -m benchmarks.serving --out serving.json`.

Each engine is a process of its own, around random weights in the shape of Llama-3.1-8B; nothing is downloaded.
Before anything is timed, the plugin keeps every block, and must give the tokens of stock vLLM and its logprobs to
2e-3. Then engines with chunks of 8192 and of 2048 tokens take turns, each with mixes of short prompts and one long
prompt, and a table is printed. Nothing is timed with a record.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Case(NamedTuple):
    """Prompts that arrive at once."""

    prompts: int
    tokens: int
    answer: int = 1

    def __str__(self) -> str:
        answer = f", {self.answer} tokens of answer" if self.answer > 1 else ""
        return f"{self.prompts} x {self.tokens:,}{answer}"


MIXES = (Case(16, 1000), Case(16, 4000), Case(4, 12000), Case(16, 1000, 64), Case(1, 12000))
LONG = (Case(1, 16384), Case(1, 32768), Case(1, 65536), Case(1, 131071), Case(4, 32768))
LEAST = 0.98  # of stock's speed, with short prompts
CHECKED = 12000  # tokens of the prompt whose logprobs are compared


def main() -> int:
    options = _options()
    if options.engine:
        return _serve(json.loads(options.engine))
    results: list[dict[str, Any]] = []

    def engine(**job: Any) -> dict[str, Any]:
        if time.perf_counter() - began > options.budget:
            print(f"no time is left for {job['label']}", flush=True)
            return {}
        found = _engine({"layers": options.layers, "repeats": options.repeats, "tiny": options.tiny, **job})
        results.append(found)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        return found

    began = time.perf_counter()
    everything = {"preset": "sparge", "settings": {"theta": 1.0}, "dense_below": 0}  # sizes do not say so
    check = {"chunk": 8192, "cases": [], "checked": 300 if options.tiny else CHECKED}
    stock, ours = engine(label="stock", **check), engine(label="dense limit", blocksparse=everything, **check)
    if (wrong := differs(stock, ours)) is not None:
        print(f"nothing is timed: with every block kept, {wrong}")
        return 1
    for chunk in map(int, options.chunks.split(",")):
        cases = [Case(3, 200), Case(1, 700, 4)] if options.tiny else [*MIXES, *LONG]
        pair = [
            engine(label=label, chunk=chunk, cases=cases, blocksparse=given)
            for label, given in (("stock", None), ("ours", json.loads(options.settings)))
        ]
        print(table(chunk, *pair), flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("serving.json"), help="every time, as JSON")
    parser.add_argument("--settings", default='{"quality": "balanced"}', help="of the plugin, as JSON")
    parser.add_argument("--chunks", default="8192,2048", help="--max-num-batched-tokens of the engines")
    parser.add_argument("--layers", type=int, default=16, help="of the model; 32 are Llama-3.1-8B's")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no engine is started")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and short prompts, to try the script on a CPU"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    return parser.parse_args()


def differs(stock: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """How the dense limit is wrong, or None."""
    if stock["token"] != ours["token"]:
        return f"the first token is {ours['token']}, and {stock['token']} without the plugin"
    worst = max(abs(stock["top"][token] - ours["top"].get(token, -99.0)) for token in stock["top"])
    return f"logprobs differ by {worst:.1e}" if worst > 2e-3 else None


def table(chunk: int, stock: dict[str, Any], ours: dict[str, Any]) -> str:
    """Seconds of both, as Markdown."""
    lines = [
        f"\nchunks of {chunk}; ours is ready after {ours.get('ready_s')} s, stock after {stock.get('ready_s')} s",
        "",
    ]
    lines += [
        "| prompts | stock, s | ours, s | times as fast | first / later | density |",
        "|---|---|---|---|---|---|",
    ]
    for case, one in stock.get("cases", {}).items():
        if (other := ours.get("cases", {}).get(case)) is None:
            continue
        before, after = median(one["times_s"]), median(other["times_s"])
        short = " (below .98)" if before / after < LEAST else ""
        numbers = f"{before:.3f} | {after:.3f} | {before / after:.2f}{short} | {other['first_s'] / after:.2f}"
        lines.append(f"| {case} | {numbers} | {other['density']} |")
    return "\n".join([*lines, "", str(ours.get("counters"))])


def _engine(job: dict[str, Any]) -> dict[str, Any]:
    """Run one engine in a process of its own; what it found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        log = Path(folder) / "log"
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.serving", "--engine", json.dumps(job | {"out": str(out)})],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise SystemExit(f"the engine of {job['label']} failed:\n" + log.read_text()[-6000:])
        for line in log.read_text().splitlines():
            if "blocksparse: " in line:
                print(line[:300], flush=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


# What follows runs in the process of an engine.


def _serve(job: dict[str, Any]) -> int:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    began, given, draw = time.perf_counter(), job.get("blocksparse"), random.Random(0)
    more: dict[str, Any] = {"worker_extension_cls": "blocksparse.integrations.vllm.worker.RecordReader"}
    if given is not None:
        more["additional_config"] = {"blocksparse": given}
    if not job["tiny"]:
        more["attention_backend"] = "FLASH_ATTN" if given is None else "BLOCKSPARSE"
    with tempfile.TemporaryDirectory() as folder:
        length = _model(Path(folder), job["layers"], tiny=job["tiny"])
        llm = LLM(
            folder, dtype="float32" if job["tiny"] else "bfloat16", load_format="dummy", skip_tokenizer_init=True,
            enforce_eager=True, enable_prefix_caching=False, gpu_memory_utilization=0.85, max_model_len=length,
            max_num_batched_tokens=job["chunk"], max_num_seqs=32, seed=0, **more,
        )  # fmt: skip
        llm.apply_model(_as_trained)

        def generate(case: Case, **sampling: Any) -> tuple[float, Any]:
            vocabulary = range(3, 500 if job["tiny"] else 128000)
            prompts = [{"prompt_token_ids": draw.choices(vocabulary, k=case.tokens)} for _ in range(case.prompts)]
            params = SamplingParams(
                max_tokens=case.answer, temperature=0.0, ignore_eos=True, detokenize=False, **sampling
            )
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start, outputs[0].outputs[0]

        found: dict[str, Any] = {**job, "ready_s": round(time.perf_counter() - began, 1), "cases": {}}
        for case in map(Case._make, job["cases"]):
            first, _ = generate(case)  # the first one after the engine's start, for the first case
            times = [generate(case)[0] for _ in range(job["repeats"])]
            found["cases"][str(case)] = {"first_s": first, "times_s": times, "density": "-"}
        if given is not None:
            found["counters"] = llm.collective_rpc("blocksparse_counters")[0]
            for case in map(Case._make, job["cases"]):
                found["cases"][str(case)]["density"] = _density(llm, lambda case=case: generate(case))  # type: ignore[misc]
        if "checked" in job:
            draw.seed(1)  # the same prompt in every process
            _, output = generate(Case(1, job["checked"]), logprobs=5)
            found["token"] = output.token_ids[0]
            found["top"] = {str(token): x.logprob for token, x in output.logprobs[0].items()}
    Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _density(llm: Any, run: Callable[[], object]) -> str:
    """Of the sparse calls of a run with a record, which is no timing."""
    llm.collective_rpc(_record, args=(True,))
    run()
    density: str = llm.collective_rpc(_record, args=(False,))[0]
    return density


def _record(worker: Any, on: bool) -> str:
    """Begin a record, or end it and say what it holds. A record takes time, so nothing is timed with one."""
    from attrs import evolve

    from blocksparse.integrations.density_recorder import DensityRecorder

    recorder = DensityRecorder() if on else None
    density = "-"
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        attention = getattr(getattr(layer, "impl", None), "attention", None)
        if attention is not None:
            if not on and attention.recorder is not None and (kept := attention.recorder.density()).numel():
                density = f"{float(kept.nanmean()):.3f}"
            layer.impl.attention = evolve(attention, recorder=recorder)
    return density


def _as_trained(model: Any) -> None:
    """Matrices of a size as before training, and norms of ones: vLLM's dummy weights are all within 1e-3."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(35.0) if parameter.dim() > 1 else parameter.fill_(1.0)


def _model(folder: Path, layers: int, *, tiny: bool) -> int:
    """Write the configuration of a model; how long its prompts may be."""
    length = 1024 if tiny else 131072
    sizes: dict[str, Any] = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256, "num_hidden_layers": layers, "head_dim": 128,
    }  # fmt: skip
    if tiny:
        sizes |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        sizes |= {"intermediate_size": 128, "vocab_size": 512, "num_hidden_layers": 2}
    config = sizes | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rope_theta": 5e5,
        "max_position_embeddings": length, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return length


if __name__ == "__main__":
    sys.exit(main())

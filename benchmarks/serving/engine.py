"""One vLLM engine in a process of its own, which serves what it is told: a line of JSON in, a line of JSON out.

`benchmarks.serving` starts several of them and lets them take turns. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.turns import CHUNK
from benchmarks.tasks.sample import Sample

SHORT = 8  # tokens, less than a page, so that no prefix cache holds them
_ON_THE_GPU, _ON_THE_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")  # what vLLM prints goes to the log
    os.dup2(2, 1)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="2", TOKENIZERS_PARALLELISM="false", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # functions of this file travel to the workers of several ranks
    )  # fmt: skip
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(json.loads(sys.stdin.readline()), Path(folder))
        found: Any = {"ready_s": round(time.perf_counter() - began, 1), "versions": engine.versions()}
        while True:
            print(json.dumps(found), file=answers, flush=True)
            if not (line := sys.stdin.readline()):
                return 0
            asked = json.loads(line)
            found = getattr(engine, asked.pop("do"))(**asked)


class Engine:
    """
    Args:
        job: `model`, the folder of one, or None for one with random weights, of which it has the `layers` and the
            part `shard` of the heads; the `length` of its prompts, and the factor `yarn` of its context, or 0; the
            `ranks` (GPUs) that share it; `tokens` that its cache holds; `chunk`, the longest; `blocksparse` (the
            plugin's configuration, or None), `compiled`, `exactly`, `tiny`, and `vllm` (more arguments of
            `vllm.LLM`).
    """

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        from vllm import LLM

        self.tiny, given, trained = job["tiny"], job["blocksparse"], job["model"] is not None
        folder = Path(job["model"]) if trained else folder
        self.tokenizer: Any
        self.text: list[int] | None
        self.tokenizer, self.text = _text_of(folder) if trained else (None, None)
        length = longest(folder, job) if trained else _model(folder, job)
        more: dict[str, Any] = {"worker_extension_cls": "blocksparse.hosts.vllm.engine.RecordReader"}
        if given is not None:
            more["additional_config"] = {"blocksparse": given}
        if not self.tiny:
            # Several engines share one GPU.
            more["kv_cache_memory_bytes"] = job["tokens"] * _token_bytes(folder) // job["ranks"]
            more["attention_backend"] = "FLASH_ATTN" if given is None else "BLOCKSPARSE"
        dtype, changed = "float32" if self.tiny else "bfloat16", _yarn(folder, job["yarn"]) if job["yarn"] else {}
        if job["exactly"]:
            dtype, changed = "float16", changed | {"head_dtype": "float32"}
        more = {
            "dtype": dtype, "load_format": "auto" if trained else "dummy", "skip_tokenizer_init": True, "seed": 0,
            "enforce_eager": not job["compiled"], "gpu_memory_utilization": 0.1, "max_model_len": length,
            "max_num_batched_tokens": min(job["chunk"], max(length, 2048)), "max_num_seqs": 32,
            "tensor_parallel_size": job["ranks"], "disable_custom_all_reduce": True, "hf_overrides": changed,
        } | more  # fmt: skip
        self.llm = LLM(str(folder), **(more | job["vllm"]))
        if not trained:
            self.llm.apply_model(_as_trained)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._most = self.scheduler.max_num_scheduled_tokens
        self.preempted, preempt = 0, self.scheduler._preempt_request

        def preempts(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempts

    def versions(self) -> dict[str, str]:
        """Of packages, the name of the GPU, and which of vLLM's classes runs the model (V1's or V2's)."""
        import torch
        import triton
        import vllm

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        runner: str = self.llm.collective_rpc(_runner)[0]
        packages = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
        return packages | {"gpu": gpu, "runner": runner}

    def serve(self, **case: Any) -> float:
        """Seconds until so many prompts are answered that arrive at once, in a process that is awake."""
        # The first work after another process's turn pays for the GPU's switch, which no server alone on it does.
        self._serve(**case | {"prompts": 1, "tokens": SHORT, "answer": 1, "seed": f"{case['seed']} before"})
        return self._serve(**case)

    def _serve(self, prompts: int, tokens: int, answer: int, chunk: int, seed: str) -> float:
        import torch
        from vllm import SamplingParams

        self.scheduler.max_num_scheduled_tokens = chunk
        given = [{"prompt_token_ids": x} for x in self._prompts(seed, [tokens] * prompts)]
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        self.llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - start

    def mix(
        self, lengths: list[int], arrivals: list[int], shared: int, answer: int, chunk: int, seed: int
    ) -> dict[str, Any]:
        """The greedy tokens of prompts that arrive at given steps and begin alike, each with its five best."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()  # of what an earlier mix of the same prompts left
        self.scheduler.max_num_scheduled_tokens = chunk
        engine, before, found = self.llm.llm_engine, self.preempted, {}
        begin, *own = self._prompts(seed, [shared, *lengths])
        waiting, step, cached = list(enumerate(zip(arrivals, own, strict=True))), 0, 0
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)
        while waiting or engine.has_unfinished_requests():
            for request, (arrives, prompt) in list(waiting):
                if arrives <= step or not engine.has_unfinished_requests():
                    prompt[:shared] = begin[: len(prompt) - 1]
                    engine.add_request(f"{seed}-{request}", {"prompt_token_ids": prompt}, params)
                    waiting.remove((request, (arrives, prompt)))
            for output in engine.step():
                if output.finished:
                    answered = output.outputs[0]
                    cached += output.num_cached_tokens or 0
                    found[int(output.request_id.split("-")[1])] = [
                        (token, {str(key): x.logprob for key, x in best.items()})
                        for token, best in zip(answered.token_ids, answered.logprobs, strict=True)
                    ]
            step += 1
        answers = [found[request] for request in range(len(lengths))]
        return {"answers": answers, "cached": cached, "preempted": self.preempted - before}

    def answer(self, file: str) -> list[float]:
        """Scores of the greedy answers to the prompts of a task, `Sample`s as JSON."""
        from vllm import SamplingParams

        self.scheduler.max_num_scheduled_tokens = self._most
        prepared = json.loads(Path(file).read_text())
        given = [{"prompt_token_ids": sample["ids"]} for sample in prepared]
        params = [
            SamplingParams(max_tokens=sample["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
            for sample in prepared
        ]
        answers = self.llm.generate(given, params, use_tqdm=False)
        return [
            Sample(**sample).score(self.tokenizer.decode(answer.outputs[0].token_ids))
            for sample, answer in zip(prepared, answers, strict=True)
        ]

    def load(self, arrivals: list[tuple[float, int, int]], seed: str) -> list[list[float]]:
        """When each token of each request came, in seconds, of requests that arrive at given times.

        Prompts are cut into chunks of 8192. A request that arrives during a step waits for its end, as in vLLM's
        server, whose engine runs by itself.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.scheduler.max_num_scheduled_tokens = min(self._most, CHUNK)
        prompts = self._prompts(seed, [tokens for _, tokens, _ in arrivals])
        engine, added = self.llm.llm_engine, 0
        times: list[list[float]] = [[] for _ in arrivals]
        start = time.perf_counter()
        while added < len(arrivals) or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while added < len(arrivals) and arrivals[added][0] <= now:
                params = SamplingParams(
                    max_tokens=arrivals[added][2], temperature=0.0, ignore_eos=True, detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )  # fmt: skip
                engine.add_request(f"{seed}-{added}", {"prompt_token_ids": prompts[added]}, params)
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(arrivals[added][0] - (time.perf_counter() - start), 0))
                continue
            for output in engine.step():
                after = round(time.perf_counter() - start, 5)
                request = int(output.request_id.rpartition("-")[2])
                times[request] += [after] * len(output.outputs[0].token_ids)
        return times

    def attend(self, on: bool) -> None:
        """Whether layers attend, as they do at first. Without, their outputs are zeros."""
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc(_attend, args=(on,))

    def become(self, blocksparse: dict[str, Any]) -> None:
        """Exchange the pipelines of the layers for those of another configuration. Its first run compiles them."""
        self.llm.reset_prefix_cache()  # the other one may have served the same prompts
        self.llm.collective_rpc(_become, args=(blocksparse,))

    def density(self, **case: Any) -> str:
        """Of the sparse calls of a run with a record, which is no timing."""
        self.llm.collective_rpc(_record, args=(True,))
        self._serve(**case)
        density: str = self.llm.collective_rpc(_record, args=(False,))[0]
        return density

    def profile(self, **case: Any) -> dict[str, Any]:
        """Milliseconds and launches of each kernel of a run, in the order of their first ones, and its seconds.

        Calls of CUDA by the host likewise, since one that waits for the GPU costs a step more than all launches.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            seconds = self._serve(**case)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiled.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_bytes())["traceEvents"]
        kernels: dict[str, list[float]] = {}
        calls: dict[str, list[float]] = {}
        for event in sorted((x for x in events if "dur" in x), key=lambda x: x["ts"]):
            name, category = event["name"][:90], event.get("cat")
            if name == "_kernel":  # of Triton, as many are called; these two numbers tell them apart
                used = event["args"]
                name += f" of {used.get('registers per thread')} registers and {used.get('shared memory')} bytes"
            for some, categories in ((kernels, _ON_THE_GPU), (calls, _ON_THE_HOST)):
                if category in categories:
                    ms, count = some.get(name, (0.0, 0))
                    some[name] = [ms + event["dur"] / 1e3, count + 1]
        gpu_ms = sum(ms for ms, _ in kernels.values())
        return {
            "seconds": seconds,
            "gpu_ms": gpu_ms,
            "kernels": list(kernels.items()),
            "calls": list(calls.items()),
        }

    def counters(self) -> str:
        """How many prompts were sparse, and why others were not."""
        found: str = self.llm.collective_rpc("blocksparse_counters")[0]
        return found

    def memory(self) -> list[float]:
        """GiB of the first worker: of the GPU what tensors hold and what PyTorch has taken, and of the host."""
        found: list[float] = self.llm.collective_rpc(_memory)[0]
        return found

    def _prompts(self, seed: int | str, lengths: list[int]) -> list[list[int]]:
        draw = random.Random(seed)
        if self.text is not None:
            starts = [draw.randrange(len(self.text) - length) for length in lengths]
            return [self.text[at : at + length] for at, length in zip(starts, lengths, strict=True)]
        return [draw.choices(range(3, 500 if self.tiny else 128000), k=length) for length in lengths]


def _record(worker: Any, on: bool) -> str:
    """Begin a record, or end it and say what it holds. A record takes time, so nothing is timed with one."""
    from attrs import evolve

    from blocksparse.observe.density_recorder import DensityRecorder

    recorder = DensityRecorder() if on else None
    density = "-"
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        attention = getattr(getattr(layer, "impl", None), "attention", None)
        if attention is not None:
            if not on and attention.recorder is not None and (kept := attention.recorder.density()).numel():
                density = f"{float(kept.nanmean()):.3f}"
            layer.impl.attention = evolve(attention, recorder=recorder)
    return density


def _become(worker: Any, given: dict[str, Any]) -> None:
    """Sizes that go sparse stay those of the first configuration."""
    from attrs import evolve

    from blocksparse.hosts.serving.settings import Settings
    from blocksparse.hosts.vllm.engine import HOST, served_by

    config = worker.vllm_config
    settings = Settings.of({"blocksparse": given}, served_by(config), HOST)
    for layer in config.compilation_config.static_forward_context.values():
        attention = getattr(getattr(layer, "impl", None), "attention", None)
        if attention is not None:
            pipeline = settings.layers[attention.layer]
            layer.impl.attention = evolve(attention, pipeline=pipeline)


def _attend(worker: Any, on: bool) -> None:
    def nothing(layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, output: Any, **_: Any) -> Any:
        return output.zero_()

    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if (impl := getattr(layer, "impl", None)) is not None:
            vars(impl).pop("forward", None)
            if not on:
                impl.forward = nothing


def _runner(worker: Any) -> str:
    return type(worker.model_runner).__module__


def _memory(worker: Any) -> list[float]:
    import torch

    gpu = torch.cuda.is_available()
    there, taken = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if gpu else (0, 0)
    here = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # resident, on Linux
    return [round(x / 2**30, 4) for x in (there, taken, here)]


def _as_trained(model: Any) -> None:
    """Matrices of a size as before training, and norms of ones: vLLM's dummy weights are all within 1e-3."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(35.0) if parameter.dim() > 1 else parameter.fill_(1.0)


def _text_of(folder: Path) -> tuple[Any, list[int]]:
    """The tokenizer of a model, and Python's library as tokens."""
    from transformers import AutoTokenizer

    from benchmarks.trained.texts import text_of

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, tokenizer.encode(text_of("code", "report")[:2_500_000], add_special_tokens=False)


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def longest(folder: Path, job: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt and its answer that an engine serves."""
    most: int = int(_config(folder)["max_position_embeddings"] * (job["yarn"] or 1))
    return min(int(job["length"]), most)


def _token_bytes(folder: Path) -> int:
    """Of a token in the cache of all layers, keys and values in two bytes each."""
    config = _config(folder)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size: int = config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 4
    return size


def _yarn(folder: Path, factor: float) -> dict[str, Any]:
    """What of a model's configuration changes with YaRN, as Qwen's authors set it."""
    config = _config(folder)
    theta, trained = config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "rope_theta": theta,
    }
    return {"rope_parameters": rope, "max_position_embeddings": int(trained * factor)}


def _model(folder: Path, job: dict[str, Any]) -> int:
    """Write the configuration of a model; how long its prompts may be."""
    length, part = 1024 if job["tiny"] else job["length"], job["shard"]
    sizes: dict[str, Any] = {
        "hidden_size": 4096, "num_attention_heads": 32 // part, "num_key_value_heads": 8 // part,
        "intermediate_size": 14336 // part, "vocab_size": 128256, "num_hidden_layers": job["layers"],
        "head_dim": 128,
    }  # fmt: skip
    if job["tiny"]:
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

"""One engine in a process of its own: it reads a job as JSON from stdin and writes what came of it to a file.

A job has the options of the engine, and mixes of requests that are served one after another. Requests of a mix
arrive at given steps, and the mix says how many tokens are read at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

ALWAYS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "seed": 0,
    "worker_extension_cls": "blocksparse.hosts.vllm.engine.RecordReader",
}


class Watched:
    """What the scheduler of an engine does."""

    def __init__(self, llm: LLM) -> None:
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.preempted = self.mixed = self.chunks = 0
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            tokens = output.num_scheduled_tokens.values()
            self.mixed += 1 in tokens and any(x > 1 for x in tokens)
            self.chunks += sum(x > 1 for x in tokens)
            return output

        def preempts(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler.schedule, self.scheduler._preempt_request = scheduled, preempts

    @contextmanager
    def calls(self) -> Iterator[dict[str, int]]:
        """How often functions of this library are called meanwhile, by name."""
        found: dict[str, int] = {}

        def saw(frame: Any, event: str, _: object) -> None:
            if event == "call" and f"{os.sep}blocksparse{os.sep}" in frame.f_code.co_filename:
                found[frame.f_code.co_qualname] = found.get(frame.f_code.co_qualname, 0) + 1

        before = sys.getprofile()
        sys.setprofile(saw)
        try:
            yield found
        finally:
            sys.setprofile(before)


def serve(
    llm: LLM, watched: Watched, mix: dict[str, Any], number: int
) -> tuple[list[list[int]], int, list[dict[str, int]]]:
    """The tokens of each request of a mix, how many tokens of prompts were in the cache, and calls by step."""
    engine, waiting = llm.llm_engine, list(enumerate(mix["requests"]))
    watched.scheduler.max_num_scheduled_tokens = mix["chunk"]
    tokens: dict[int, list[int]] = {}
    step = cached = 0
    calls = []
    while waiting or engine.has_unfinished_requests():
        for one in [x for x in waiting if x[1]["arrives"] <= step]:
            waiting.remove(one)
            params = SamplingParams(
                temperature=0, max_tokens=one[1]["tokens"], ignore_eos=True, extra_args=one[1].get("extra_args")
            )
            adapter = LoRARequest("adapter", 1, one[1]["adapter"]) if "adapter" in one[1] else None
            engine.add_request(
                f"{number}-{one[0]}", {"prompt_token_ids": one[1]["prompt"]}, params, lora_request=adapter
            )
        with watched.calls() as found:
            outputs = engine.step()
        calls.append(found)
        for output in outputs:
            if output.finished:
                tokens[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
                cached += output.num_cached_tokens or 0
        step += 1
    return [tokens[i] for i in range(len(mix["requests"]))], cached, calls


def main(out: Path) -> None:
    job = json.load(sys.stdin)
    if job.get("backend"):
        load_general_plugins()  # which would put another one in its place later
        register_backend(AttentionBackendEnum.CPU_ATTN, job["backend"])
    llm = LLM(**ALWAYS | job["engine"])
    watched = Watched(llm)
    served = [serve(llm, watched, mix, number) for number, mix in enumerate(job["mixes"])]
    result = {
        "tokens": [tokens for tokens, _, _ in served],
        "cached": sum(cached for _, cached, _ in served),
        "calls": [calls for _, _, calls in served],
        "counters": llm.collective_rpc("blocksparse_counters")[0],
        "exported": REGISTRY.get_sample_value("blocksparse_prompts_total", {"attention": "little work"}),
        "audit": llm.collective_rpc("blocksparse_audit")[0],
        "preempted": watched.preempted,
        "mixed": watched.mixed,
        "chunks": watched.chunks,
        "table": llm.collective_rpc("blocksparse_table")[0] if "additional_config" in job["engine"] else "",
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""An engine as users start it, in a process that is spawned; argv: a model, and a configuration as JSON."""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn"
)

from vllm import LLM, SamplingParams


def main(model: str, configuration: str) -> None:
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        attention_backend="BLOCKSPARSE",
        attention_config={"backend_per_kind": {"full_attention": "CUSTOM"}},
        additional_config=json.loads(configuration),
        worker_extension_cls="blocksparse.hosts.vllm.engine.RecordReader",
    )
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(3, 403))}, params, use_tqdm=False)
    print(*llm.collective_rpc("blocksparse_table"), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

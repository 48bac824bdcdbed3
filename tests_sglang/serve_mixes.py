"""An engine: it reads a job as JSON from stdin and writes what came of it to a file.

A job has the options of the engine, and mixes of requests that are served one after another. Requests of a mix
arrive some hundredths of a second after one another.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import sglang

ALWAYS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "context_length": 1024,
    "random_seed": 0,
    "log_level": "info",
}


async def serve(engine: Any, mix: dict[str, Any]) -> list[dict[str, Any]]:
    async def ask(one: dict[str, Any]) -> Any:
        await asyncio.sleep(one["arrives"] / 100)
        params = {"temperature": 0, "max_new_tokens": one["tokens"]}
        return await engine.async_generate(input_ids=one["prompt"], sampling_params=params)

    answers: list[dict[str, Any]] = await asyncio.gather(*map(ask, mix["requests"]))
    return answers


def main(out: Path) -> None:
    job = json.load(sys.stdin)
    engine = sglang.Engine(**ALWAYS | job["engine"])
    served = [engine.loop.run_until_complete(serve(engine, mix)) for mix in job["mixes"]]
    facts = [answer["meta_info"] for mix in served for answer in mix]
    result = {
        "tokens": [[answer["output_ids"] for answer in mix] for mix in served],
        "cached": sum(fact["cached_tokens"] for fact in facts),
        "retracted": sum(fact["num_retractions"] for fact in facts),
        "table": engine.get_server_info()["internal_states"][0].get("blocksparse", ""),
    }
    out.write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

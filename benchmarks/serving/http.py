"""vLLM's load generator on `vllm serve`, unmodified and with the plugin: `python -m benchmarks.serving.http`.

One server after the other, each in a process of its own on a new port, answers the same prompts at each rate of a
Poisson process: 70 % of the prompts have 128 to 2K tokens, 25 % 2K to 16K and 5 % 32,000, of Python's library.
Every command is printed before it runs. Needs vLLM's extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.serving.load import LENGTHS

PLUGIN = ("--attention-backend", "BLOCKSPARSE", "--additional-config", '{"blocksparse": {"quality": "balanced"}}')
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
LONGEST = 32_000
WARM = 40  # prompts before the others, which compile
COLUMNS = (
    "completed", "request_throughput", "p50_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms",
)  # fmt: skip


def write_prompts(model: Path, counts: Mapping[Path, int], most: int) -> None:
    """Files with so many prompts of mixed lengths, of at most `most` tokens, for vLLM's dataset `custom`."""
    from transformers import AutoTokenizer

    from benchmarks.trained.texts import text_of

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = tokenizer.encode(text_of("code", "report")[:2_000_000], add_special_tokens=False)
    for path, count in counts.items():
        draw = random.Random(path.stem)
        with path.open("w", encoding="utf-8") as file:
            for _ in range(count):
                (_, low, high) = draw.choices(LENGTHS, [share for share, _, _ in LENGTHS])[0]
                tokens = min(draw.randint(low, high), most)
                start = draw.randrange(len(ids) - tokens)
                print(json.dumps({"prompt": tokenizer.decode(ids[start : start + tokens])}), file=file)


@contextmanager
def server(options: argparse.Namespace, name: str, more: tuple[str, ...]) -> Iterator[str]:
    """The address of a server with these arguments, and nothing of it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VLLM, "serve", str(options.model), "--port", str(port), "--served-model-name", "model"]
    command += [*shlex.split(options.serve), *more]
    said(command)
    with (options.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, options.start)
        yield address
    finally:
        for by, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            with suppress(ProcessLookupError):  # of a group without processes
                os.killpg(process.pid, by)  # the engine, a child of the server, holds the GPU's memory
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)


def wait_for(address: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when the server answers; stop if it ends first or takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}; its log says why")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the server did not answer within {seconds:.0f} s; its log says why")


def load(options: argparse.Namespace, address: str, name: str, prompts: Path, *more: str) -> dict[str, float]:
    """What `vllm bench serve` finds with these prompts."""
    command = [*VLLM, "bench", "serve", "--backend", "openai", "--base-url", address, "--model", "model"]
    command += ["--tokenizer", str(options.model), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--skip-chat-template", "--ignore-eos", "--temperature", "0", "--disable-tqdm", *more]
    command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,95,99"]
    command += ["--save-result", "--result-dir", str(options.out), "--result-filename", f"{name}.json"]
    said(command)
    with (options.out / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    found: dict[str, float] = json.loads((options.out / f"{name}.json").read_text())
    return found


def said(command: list[str]) -> None:
    print("$ vllm", shlex.join(command[len(VLLM) :]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with trained weights and a tokenizer")
    parser.add_argument(
        "--rates", nargs="+", default=["4x120", "8x360", "12x240"], help="requests per second x requests"
    )
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--most", type=int, default=LONGEST, help="tokens of a prompt")
    parser.add_argument("--serve", default="--max-model-len 32768", help="more arguments of both servers")
    parser.add_argument("--start", type=float, default=300, help="seconds that a server may take to start")
    parser.add_argument(
        "--out", type=Path, default=Path("serving-http"), help="a folder for prompts, logs and results"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    counts = {"warm": WARM} | {rate: int(rate.partition("x")[2]) for rate in options.rates}
    prompts = {rate: options.out / f"prompts-{rate}.jsonl" for rate in counts}
    write_prompts(options.model, {prompts[rate]: count for rate, count in counts.items()}, options.most)
    rows = ["| rate | engine | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, more in (("unmodified", ()), ("plugin", PLUGIN)):
        with server(options, name, more) as address:
            warm = "--custom-output-len", "8", "--num-prompts", str(WARM)
            load(options, address, f"{name}-warm", prompts["warm"], *warm)
            for rate in options.rates:
                per_second, _, count = rate.partition("x")
                found = load(
                    options, address, f"{name}-{rate}", prompts[rate], "--custom-output-len", str(options.answer),
                    "--num-prompts", count, "--request-rate", per_second,
                )  # fmt: skip
                cells = [f"{found[key]:.2f}" for key in COLUMNS]
                rows.append(f"| {per_second} | {name} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()

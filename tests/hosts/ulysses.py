"""Context parallelism of diffusers over two processes on a CPU; `test_diffusers.test_ulysses` runs this."""

from __future__ import annotations

import os
import tempfile

import torch
from diffusers import ContextParallelConfig
from tests.hosts.diffusion_models import CASES, given
from tests.hosts.test_diffusers import DENSE_LIMIT, attached, made, run
from torch import distributed, multiprocessing

RANKS = 2


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.accelerator.device_count = lambda: 1  # diffusers asks, on a CPU too
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in ("wan", "flux"):
        model, inputs = made(CASES[name]), given(CASES[name], (4, 4, 4))
        if name == "flux":  # one more token of text, so that each rank has as many
            inputs |= {"encoder_hidden_states": torch.randn(1, 8, 16), "txt_ids": torch.zeros(8, 3)}
        dense = run(model, inputs)
        with attached(model):
            sparse = run(model, inputs)
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))
        with attached(model, DENSE_LIMIT):
            assert (run(model, inputs) - dense).abs().max() <= 1e-6
        with attached(model):
            assert (run(model, inputs) - sparse).abs().max() <= 1e-6
        assert (sparse - dense).abs().max() > 1e-2
        print("as one rank", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # threads of gloo and of compiled kernels may abort an interpreter that ends while they do


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forked before anything has run, so that diffusers is imported once; but no forked process may use CUDA.
        method = "spawn" if torch.cuda.is_available() else "fork"
        multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            work, (f"{folder}/store",), nprocs=RANKS, start_method=method
        )

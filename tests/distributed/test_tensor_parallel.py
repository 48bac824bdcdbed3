"""A model whose heads are spread over ranks already needs nothing: each rank runs the pipeline on its heads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import blocksparse as bs
from tests.distributed.processes import on_ranks
from tests.tiny_model import tiny_llama


def difference(rank: int, folder: Path) -> tuple[float, float]:
    """How far the logits of a model on two ranks are from those on one, and how large they are."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from blocksparse.hosts.transformers import attach

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun does
    model, tokens = tiny_llama(), torch.randint(260, (1, 200), generator=torch.Generator().manual_seed(0))
    pipeline = bs.pbs_attn(0.5, block=16, S=32)
    dense = model(tokens).logits
    with attach(model, pipeline, min_tokens=1):
        want = model(tokens).logits
    assert not torch.allclose(want, dense, atol=1e-3)
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    by_heads = DistributedConfig(tp_plan="auto")
    parallel = LlamaForCausalLM.from_pretrained(folder, distributed_config=by_heads).eval()
    assert parallel.model.layers[0].self_attn.k_proj.weight.to_local().shape == (16, 64)
    with attach(parallel, pipeline, min_tokens=1):
        got = parallel(tokens).logits
    return float((got - want).abs().max()), float(want.abs().max())


@pytest.mark.slow
def test_a_tensor_parallel_model_takes_the_same_attach(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    results = on_ranks(2, difference, tmp_path)
    assert all(isinstance(result, tuple) for result in results), "\n".join(map(str, results))
    for error, size in results:
        assert error < 1e-5 * size

"""A model whose heads are spread over ranks already needs nothing: each rank runs the pipeline on its heads."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blocksparse as bs
from tests.distributed.processes import on_ranks


def difference(_rank: int) -> tuple[float, float]:
    """How far the logits of a model on two ranks are from those on one, and how large they are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from blocksparse.integrations.transformers import attach

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model, tokens = LlamaForCausalLM(config).eval(), torch.randint(61, (1, 200))
    dense = model(tokens).logits
    with attach(model, bs.pbs_attn(0.5, block=16, S=32), min_tokens=1):
        want = model(tokens).logits
        assert not torch.allclose(want, dense)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("heads",))
        by_heads = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        for layer in model.model.layers:
            parallelize_module(layer, mesh, {**by_heads, "self_attn.o_proj": RowwiseParallel()})
            assert layer.self_attn.q_proj.weight.to_local().shape == (32, 64)
        got = model(tokens).logits
    return float((got - want).abs().max()), float(want.abs().max())


def test_a_tensor_parallel_model_takes_the_same_attach() -> None:
    pytest.importorskip("transformers")
    for result in on_ranks(2, difference):
        assert isinstance(result, tuple), result
        error, size = result
        assert error < 1e-5 * size

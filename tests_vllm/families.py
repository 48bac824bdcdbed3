"""Which layers go sparse in each model that vLLM and transformers know: JSON by model type.

Models are made without weights, from the default configuration of their type.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="CRITICAL", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry

from blocksparse.hosts.vllm.impl import SparsePrefill

MLA = "MLA"
# Attributes of released models that the default configuration of their type lacks.
LACKING: dict[str, dict[str, Any]] = {"glm4_moe": {"head_dim": 128, "num_key_value_heads": 8}}
# Types that vLLM runs with the code of transformers, as it does all that are not in its registry.
BY_TRANSFORMERS = ("glm", "olmo2", "olmo3", "phi", "smollm3")


def architectures() -> dict[str, str]:
    """The architecture of each model type."""
    known = {**registry._TEXT_GENERATION_MODELS}
    found: dict[str, str] = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            if name in known or kind in BY_TRANSFORMERS:
                found.setdefault(kind, name)
    return found


def layers(kind: str, architecture: str) -> dict[str, int]:
    """How many attention layers of a model are "sparse", or why they are not."""
    config: PretrainedConfig = CONFIG_MAPPING[kind](**LACKING.get(kind, {}))
    config.architectures = [architecture]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        # vLLM itself turns prefix caching off for MLA on a CPU without AMX, too late for a hybrid's block size.
        engine = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=1024,
            enforce_eager=True, enable_prefix_caching=False, additional_config={"blocksparse": {"preset": "auto"}},
        ).create_engine_config()  # fmt: skip
    if engine.model_config.use_mla:
        return {MLA: engine.model_config.hf_text_config.num_hidden_layers}
    with set_current_vllm_config(engine):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        with torch.device("meta"):
            initialize_model(engine)
    found = Counter[str]()
    for name, layer in engine.compilation_config.static_forward_context.items():
        if isinstance(impl := getattr(layer, "impl", None), SparsePrefill):
            impl.place(name, layer)
            found[impl.dense_because or "sparse"] += 1
    return dict(found)


def main(out: Path) -> None:
    logging.disable(logging.CRITICAL)
    registry._run_in_subprocess = lambda inspect: inspect()  # a process for each model takes minutes
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = sys.modules[name] = types.ModuleType(name)  # models with pictures import it, and none is made
        module.functional = module  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for kind, architecture in sorted(architectures().items()):
        try:
            found[kind] = layers(kind, architecture)
        except Exception as error:  # a configuration that is no model by default, or kernels that a CPU lacks
            found[kind] = f"{type(error).__name__}: {error}"[:200]
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

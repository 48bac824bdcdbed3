"""Libraries that this machine's C++ compiler makes of files of kernels, when a kernel is first used, and calls of them.

One command compiles one file, for this CPU, into the user's cache folder. The name of the result holds a hash of the source,
the flags, the compiler and the CPU. So a library built from other sources, or for another machine with the same home folder,
is never loaded. A wheel may bring libraries that are compiled already, for several kinds of CPUs. Those in the folder
`compiled` next to the source, with the source's hash in their names, are tried first.

Whatever goes wrong gives a reason in words, never an exception: callers then do without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes as the kernels number them."""
_PROCESS = os.getpid()  # that loaded this module, and may have started OpenMP's threads


def steps(x: Tensor, axes: int) -> Any:
    """The strides of the first axes; 0 for an axis of one entry, which serves all."""
    return (ctypes.c_int64 * axes)(*(x.stride(i) if x.shape[i] > 1 else 0 for i in range(axes)))


@functools.cache
def structure(source: Path, name: str) -> type[ctypes.Structure]:
    """The struct `name` of a file of kernels: numbers, arrays of them, addresses, and other structs of the file."""
    text = re.sub("//.*", "", source.read_text(encoding="utf-8"))
    (body,) = re.findall(rf"^struct {name} {{(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    fields: list[tuple[str, Any]] = []
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, _, names = line.partition(" ")
        if addresses := re.findall(r"\*\s?(\w+)", line):
            fields += ((address, ctypes.c_void_p) for address in addresses)
            continue
        numbers = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
        of: Any = numbers.get(kind) or structure(source, kind)
        for field, size in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            fields.append((field, of * int(size) if size else of))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@final
class Call:
    """A call of a compiled kernel: a struct of its source, filled in by name. What is not set is 0 or null."""

    def __init__(self, source: Path, name: str) -> None:
        self.struct: Any = structure(source, name)()
        self._held: list[Tensor] = []

    def set(self, part: str = "", /, **values: Any) -> None:
        """Set fields of the struct, or of its `part`. A tensor gives its address, and lives as long as the call."""
        to = attrgetter(part)(self.struct) if part else self.struct
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._held.append(value)
                value = value.data_ptr()
            setattr(to, name, 0 if value is None else value)

    def make(self, library: Any, function: str, purpose: str) -> None:
        """Call `function` of the library.

        Raises:
            MemoryError: there is no memory for its `purpose`.
        """
        # A handler of a signal that raised, as that of Ctrl-C does, has its exception raised here.
        if getattr(library, f"blocksparse_{function}")(ctypes.byref(self.struct)):
            raise MemoryError(f"no memory {purpose}")


def team() -> dict[str, int | None]:
    """The fields by which a call knows who works: how many threads, how they start, and Python's lock."""
    release, acquire, _ = python_calls()
    return {"threads": torch.get_num_threads(), "parallel": parallel(), "release": release, "acquire": acquire}


def parallel() -> int | None:
    """The address of the function by which compilers start threads of the OpenMP that PyTorch has loaded, if any.

    A process that forks leaves OpenMP's threads behind, and OpenMP would wait for them for ever: there is none then.
    """
    return _gomp_parallel() if os.getpid() == _PROCESS else None


@functools.cache
def _gomp_parallel() -> int | None:
    try:
        return _address(ctypes.CDLL(None).GOMP_parallel)
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def python_calls() -> tuple[int | None, int | None, int | None]:
    """Addresses of the functions that release Python's lock, take it again, and run handlers of pending signals."""
    api = ctypes.pythonapi
    return (
        _address(api.PyEval_SaveThread), _address(api.PyEval_RestoreThread), _address(api.PyErr_CheckSignals)
    )  # fmt: skip


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


_KERNELS = Path(__file__).parents[1]
TIME_LIMIT = 120.0  # seconds that a compiler may take, and that a process waits for another one's
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
INSTALL = "Install a C++ compiler, such as g++ (apt install g++, dnf install gcc-c++, conda install gxx)."

# What a wheel brings: a name, the flags of the compiler, and what the CPU must have, in the words of /proc/cpuinfo.
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_V4 = "-march=x86-64-v4"
VARIANTS = (
    ("amx", (_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), (*_AVX512, "avx512_bf16", "amx_bf16")),
    ("bf16", (_V4, "-mavx512bf16"), (*_AVX512, "avx512_bf16")),
    ("avx512", (_V4,), _AVX512),
    ("avx2", ("-march=x86-64-v3",), _AVX2),
)


class UnavailableError(RuntimeError):
    """Why the library is missing, and what to do about it."""


@frozen(eq=False)
class Loaded:
    """A library, or the reason why there is none."""

    library: ctypes.PyDLL | None
    path: Path | None
    why_not: str | None
    seconds: float = 0.0  # that compiling took; 0 if it had been compiled before


def load(source: Path, *, anew: bool = False, others: bool = True) -> Loaded:
    """The library of `source`, compiled unless it is in the cache. Never raises.

    Args:
        anew: compile it even if the cache has it, or if that failed before.
        others: if it must be compiled, begin with the other kernels of this package meanwhile. A call that needs one waits.
    """
    try:
        return _load(source, anew, others)
    except (UnavailableError, OSError, subprocess.SubprocessError) as error:
        return Loaded(None, None, " ".join(str(error).split()) or type(error).__name__)


def _load(source: Path, anew: bool, others: bool) -> Loaded:
    flags = cpu_flags()
    for name, _, needs in VARIANTS:
        path = source.parent / "compiled" / _name_in_wheel(source, name)
        allowed = not _denied() or (name == "avx2" and "avx2" not in _denied())
        if not anew and path.exists() and all(need in flags.split() for need in needs) and allowed:
            return Loaded(ctypes.PyDLL(str(path)), path, None)
    command = _command()
    name = f"{source.stem}-{_key(source, command, flags)}"
    folder = cache_folder()
    path, failed = folder / f"{name}.so", folder / f"{name}.failed"
    if not anew:
        if (library := _opened(path)) is not None:
            return Loaded(library, path, None)
        if failed.exists():
            raise UnavailableError(f"{failed.read_text()} (blocksparse build tries again)")
        for other in _KERNELS.glob("*/*.cpp") if others and source.parents[1] == _KERNELS else ():
            if other != source:
                threading.Thread(target=load, args=(other,), kwargs={"others": False}).start()
    with _alone(folder / f"{name}.lock"):
        if not anew and (library := _opened(path)) is not None:  # another process has made it meanwhile
            return Loaded(library, path, None)
        print(f"blocksparse: compiling its kernel for this CPU, once: {source.name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with _workshop(folder) as shop:
            made = shop / path.name
            try:
                _compile([*command, str(source), "-o", str(made)], shop)
            except UnavailableError as error:
                with suppress(OSError):  # what cannot be written is not kept
                    failed.write_text(str(error))
                raise
            seconds = time.perf_counter() - start
            with suppress(OSError):
                failed.unlink(missing_ok=True)
                shutil.copyfile(made, shop / "whole")
                os.replace(shop / "whole", path)
            if (library := _opened(path)) is not None:
                return Loaded(library, path, None, seconds)
            # Nothing can be kept, or nothing run, where the cache is. A loaded library outlives its file.
            return Loaded(ctypes.PyDLL(str(made)), None, None, seconds)


def _opened(path: Path) -> ctypes.PyDLL | None:
    """The library in a file; None if there is none, or none that this process may run."""
    try:
        return ctypes.PyDLL(str(path)) if path.exists() else None
    except OSError:
        return None


def cache_folder() -> Path:
    """Where compiled libraries are kept: `blocksparse` in the user's cache folder."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        caches = Path(tempfile.gettempdir())
    return caches / "blocksparse"


def compile_for_wheel(source: Path, folder: Path) -> list[Path]:
    """Compile `source` for every kind of CPU that a wheel serves, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, flags, _ in VARIANTS:
        path = folder / _name_in_wheel(source, name)
        _compile([*_compiler(), *FLAGS, *flags, str(source), "-o", str(path)], folder)
        made.append(path)
    return made


def _command() -> list[str]:
    return [*_compiler(), *FLAGS, *_for_this_cpu()]


def _compiler() -> list[str]:
    """The command of a C++ compiler: that of the variable CXX, or the first at hand."""
    if os.name != "posix":
        raise UnavailableError(f"no kernel is compiled on {platform.system()}")
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        command = shlex.split(name)
        if shutil.which(command[0]):
            return command
    raise UnavailableError(f"no C++ compiler is found. {INSTALL}")


def _for_this_cpu() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64", "i686"):
        return ("-mcpu=native",)
    # ATEN_CPU_CAPABILITY may tell PyTorch to do without some instructions; then we do so as well.
    return ("-march=native", *(f"-mno-{name}" for name in _denied()))


def _denied() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return ()
    return ("avx512f",) if capability == "AVX2" else ("avx512f", "avx2", "avx")


def _key(source: Path, command: list[str], flags: str) -> str:
    version = subprocess.run(
        [*_compiler(), "--version"], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    ).stdout
    return _hashed(_text(source), *command, version, flags)[:16]


def _name_in_wheel(source: Path, variant: str) -> str:
    return f"{source.stem}-{_hashed(_text(source))[:8]}-{variant}.so"


def _text(source: Path) -> str:
    headers = sorted(Path(__file__).parent.glob("*.h"))  # what the files of kernels share
    return "\0".join(file.read_text(encoding="utf-8") for file in (source, *headers))


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def cpu_flags() -> str:
    """The instructions that the first core has, in the words of Linux; elsewhere the processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return value.strip()
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


def _compile(command: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(folder)},  # where the compiler, too, puts what it needs for a while
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} took more than {TIME_LIMIT:.0f} s") from None
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "it says nothing")
        raise UnavailableError(f"{command[0]} fails with status {result.returncode}: {first[:300]}. {INSTALL}")


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A folder for a while: in `folder` if it can be written, with some space left, else where the system has it."""
    place: Path | None = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < 2**24 or not os.access(folder, os.W_OK):
            place = None
    except OSError:
        place = None
    with tempfile.TemporaryDirectory(dir=place, prefix="building-", ignore_cleanup_errors=True) as shop:
        yield Path(shop)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process compiles the same. Do not wait where files cannot be locked or written."""
    import fcntl  # not on Windows, where nothing comes here

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")  # noqa: SIM115
    except OSError:
        yield
        return
    with lock:
        end = time.monotonic() + TIME_LIMIT
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield

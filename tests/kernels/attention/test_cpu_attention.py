"""The compiled kernel for CPUs, and what happens where it cannot be compiled."""

from __future__ import annotations

import math
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import blocksparse as bs
from blocksparse.execute.dense_attention import dense_attention
from blocksparse.kernels.attention import cpu_attention
from blocksparse.kernels.attention.cpu_attention import dense_cpu_attention
from blocksparse.kernels.common import compiled
from blocksparse.testing import make_qkv
from tests.kernels.attention import cpu_cases
from tests.machine import python
from tests.specs import not_none

SCALE = 0.125
there = cpu_attention.cpu_kernel().library is not None
needs_kernel = pytest.mark.skipif(not there, reason="the kernel is not compiled here")


@needs_kernel
@pytest.mark.parametrize("first", [0, 10, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 30))])
def test_generated_cases(first: int) -> None:
    """Blocks, strides, tails, windows, orders, softcap, sinks, dtypes; with one thread and with three."""
    threads = torch.get_num_threads()
    try:
        for seed in range(first, first + 10):
            case = cpu_cases.case(10**6 + seed)
            cpu_cases.check(case)
            assert cpu_cases.check_stops(case, seed)[1] == 0
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits() -> None:
    q, k, v = make_qkv(N=900, D=64, dtype=torch.bfloat16)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 5, 64):
            torch.set_num_threads(n)
            results.append(cpu_attention.dense_cpu_attention(q, k, v, causal=True, scale=SCALE))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@needs_kernel
def test_a_call_can_be_interrupted() -> None:
    """A signal's handler that raises ends the call, within a small part of the time that it would have taken."""

    def ring(*_: object) -> None:
        raise InterruptedError("rung")

    q, k, v = make_qkv(N=65536, Hq=2, Hkv=1, D=128)
    before = signal.signal(signal.SIGUSR1, ring)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        start = time.perf_counter()
        with pytest.raises(InterruptedError, match="rung"):
            cpu_attention.dense_cpu_attention(q, k, v, causal=True, scale=SCALE)
        assert time.perf_counter() - start < 5.0  # the call takes some 15 s on a core
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    out, _ = cpu_attention.dense_cpu_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], causal=True, scale=SCALE)
    assert bool(out.isfinite().all())


FORK = """
import os, warnings, torch
from blocksparse.kernels.attention.cpu_attention import dense_cpu_attention
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says so of every fork of a process with threads
torch.set_num_threads(2)
q = torch.randn(1, 2, 150, 32)  # so small that PyTorch itself, which would wait for ever, takes one thread
want = dense_cpu_attention(q, q, q, causal=True, scale=0.1)[0]
child = os.fork()
if not child:
    same = torch.equal(dense_cpu_attention(q, q, q, causal=True, scale=0.1)[0], want)
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_kernel
@pytest.mark.slow
def test_a_forked_process_attends_too() -> None:
    result = python(FORK)
    assert (result.stdout.strip(), result.stderr.strip()) == ("0", "")


CALL = """
import torch, blocksparse as bs
from blocksparse.kernels.attention.cpu_attention import cpu_kernel
q = torch.randn(1, 4, 300, 32)
torch.testing.assert_close(
    bs.mean_pooling(block=64)(q, q, q), bs.mean_pooling(block=64, executor=bs.ReferenceExecutor())(q, q, q))
bs.mean_pooling(block=64)(q, q, q)
print("kernel" if cpu_kernel().library else "none", flush=True)
"""


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.slow
def test_without_a_compiler_calls_give_the_same(tmp_path: Path) -> None:
    """With one warning a process."""
    compiler, cache = _script(tmp_path / "cxx", "exit 3"), str(tmp_path / "cache")
    result = python(CALL, CXX=compiler, XDG_CACHE_HOME=cache)
    assert result.stdout.strip() == "none"
    assert result.stderr.count("several times faster") == 1


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("exit 127", "fails with status 127"),
        ('[ "$1" = --version ] || { echo "x.cpp:1: error: no such thing" >&2; exit 1; }', "error: no such thing"),
        (
            '[ "$1" = --version ] || { for a in "$@"; do o=$a; done; echo nonsense > "$o"; }',
            "file too short|invalid",
        ),
    ],
    ids=["broken", "failing", "writes no library"],
)
def test_a_compiler_that_does_not_work_is_a_reason(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _script(tmp_path / "cxx", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = compiled.load(cpu_attention.SOURCE)
    assert found.library is None
    assert re.search(sentence, str(found.why_not))


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = compiled.load(cpu_attention.SOURCE)
    assert found.library is None
    assert "apt install g++" in not_none(found.why_not)


def test_a_slow_compiler_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next process does not wait for it again."""
    slow = _script(tmp_path / "cxx", '[ "$1" = --version ] || exec sleep 60')
    monkeypatch.setenv("CXX", slow)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "TIME_LIMIT", 0.2)
    assert "took more than 0 s" in str(compiled.load(cpu_attention.SOURCE).why_not)
    monkeypatch.setenv("CXX", slow)
    assert "blocksparse build tries again" in str(compiled.load(cpu_attention.SOURCE).why_not)


def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source, so that it compiles in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "quick.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return source


@needs_kernel
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _quick(tmp_path, monkeypatch)
    first, second = compiled.load(source), compiled.load(source)
    assert not_none(first.library).answer() == 42
    assert first.seconds > 0.0 == second.seconds
    assert first.path == second.path
    files = sorted(path.suffix for path in compiled.cache_folder().iterdir())
    assert files == [".lock", ".so"]
    source.write_text('extern "C" int answer() { return 43; }\n')  # another source has a name of its own
    other = compiled.load(source)
    assert not_none(other.library).answer() == 43
    monkeypatch.setattr(compiled, "cpu_flags", lambda: "another")  # and so has another CPU on the same home
    assert compiled.load(source).path not in (first.path, other.path)


@needs_kernel
@pytest.mark.parametrize("wrong", ["no folder", "a full disk", "a spoilt file"])
def test_a_place_for_the_kernel_that_fails(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user `nobody`, or where the home is a file; the kernel is compiled all the same."""
    source = _quick(tmp_path, monkeypatch)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if wrong == "no folder":
        (tmp_path / "cache").write_text("a file")
    elif wrong == "a full disk":
        monkeypatch.setattr("shutil.copyfile", full)
    else:
        path = not_none(compiled.load(source).path)
        path.unlink()
        path.write_bytes(b"half a lib")
    found = compiled.load(source)
    assert not_none(found.library).answer() == 42
    assert wrong != "no folder" or found.path is None


@needs_kernel
def test_kernels_are_compiled_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants the second one waits for it, and compiles nothing."""
    quick = _quick(tmp_path, monkeypatch)
    first, second = (tmp_path / "kernels" / room / f"{room}.cpp" for room in ("one", "two"))
    for source in (first, second):
        source.parent.mkdir(parents=True)
        source.write_text(quick.read_text())
    monkeypatch.setattr(compiled, "_KERNELS", tmp_path / "kernels")
    assert compiled.load(first).seconds > 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(60)
    found = compiled.load(second)
    assert (not_none(found.library).answer(), found.seconds) == (42, 0.0)


@needs_kernel
@pytest.mark.slow
def test_processes_at_once_make_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _quick(tmp_path, monkeypatch)
    code = f"from blocksparse.kernels.common.compiled import load; from pathlib import Path\nf = load(Path({str(source)!r}))\nprint(f.library.answer(), f.seconds > 0)"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for _ in range(3)
    ]
    said = sorted(run.communicate(timeout=240)[0].strip() for run in runs)
    assert said == ["42 False", "42 False", "42 True"]
    assert len(list(compiled.cache_folder().glob("*.so"))) == 1


@needs_kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels bring kernels for x86 alone")
def test_a_wheel_brings_what_the_cpu_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _quick(tmp_path, monkeypatch)
    made = compiled.compile_for_wheel(source, tmp_path / "compiled")
    assert [path.stem.split("-")[::2] for path in made] == [
        ["quick", x] for x in ("amx", "bf16", "avx512", "avx2")
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for flags, name in (("avx2 fma f16c bmi2", "avx2"), (" ".join(compiled.VARIANTS[1][2]), "bf16")):
        monkeypatch.setattr(compiled, "cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr(compiled, "_denied", tuple)
        found = compiled.load(source)
        assert found.path in made
        assert str(found.path).endswith(f"-{name}.so")
    source.write_text(source.read_text() + "\n")  # what was made of another source does not serve
    assert "no C++ compiler is found" in str(compiled.load(source).why_not)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_far_from_0_are_weighed_as_in_float64(dtype: torch.dtype) -> None:
    """The maximum of a row is subtracted before the scale, as a product that is rounded apart would be off by units."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).to(dtype) for _ in range(3))
    out, lse = dense_cpu_attention(q * 1e5, k * 1e5, v, causal=True, scale=0.125)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    best = (q.double() @ k.double().mT).masked_fill(torch.ones(256, 256).triu(1).bool(), -math.inf).argmax(-1)
    torch.testing.assert_close(out[0, 0], v[0, 0, best[0, 0]])


@needs_kernel
def test_what_notes_operations_misses_nothing() -> None:
    """Attention that a traced graph would lack is left to PyTorch's operations."""
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    dense = partial(dense_attention, k=k, v=v, spec=bs.AttentionSpec(scale=0.25))
    torch.testing.assert_close(make_fx(dense)(q)(q + 1), dense(q + 1))


@needs_kernel
def test_views_with_the_negative_bit() -> None:
    q, k, v = (torch._neg_view(torch.randn(1, 2, 128, 16)) for _ in range(3))
    torch.testing.assert_close(
        dense_cpu_attention(q, k, v, causal=True, scale=0.25)[0],
        dense_cpu_attention(*(x.resolve_neg() for x in (q, k, v)), causal=True, scale=0.25)[0],
    )
